"""Compare this checkpointer with Orbax's emergency and p2p managers and with plain Orbax.

    python -m benchmarks.compare [--quick] [--jobs 2x1x1024,2x1x125/2000] [--rounds 3]

All contenders run the same job with the same state, in turn and in fresh processes, for several
rounds: one process per host on loopback, a ramdisk directory per host, one directory as storage. In
a round a contender saves to RAM and to storage and all processes end; then, for each loss, fresh
processes restore and compare every shard bit for bit. The machine's own limits are measured as
well. Writes compare.json and compare.png. benchmarks/README.md explains each row.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import limits, machine, plain_readers, warm
from benchmarks.common.arguments import above_0, parse_with_quick, positive, some_of, words
from benchmarks.common.contenders import MODULES
from benchmarks.common.job import LOST_SLICE, SCENARIOS, Shape, parse_job
from benchmarks.common.lives import IMPORTED_BY_ALL, Place, RoundFailed, run_round
from benchmarks.compare import plot, report, targets

BASE = targets.OURS
JOBS = ("2x1x1024", "2x2x512", "4x1x256", "2x1x125/2000")
_QUICK = {
    "jobs": "2x1x64",
    "rounds": 1,
    "saves": 2,
    "restores": "slice,storage",
    "limits_mib": 64,
}
# The most that a contender keeps of each slice's state at one time, one of it set aside.
_COPIES_ON_RAMDISK = 4
_COPIES_IN_PROCESS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parse_with_quick(parser, arguments, _QUICK)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        shapes = [parse_job(job, options.saves) for job in options.jobs]
        one_bytes = max(shape.slices * shape.state_bytes for shape in shapes)
        machine.require_room(
            options.ramdisk,
            _COPIES_ON_RAMDISK * one_bytes,
            (_COPIES_ON_RAMDISK + _COPIES_IN_PROCESS) * one_bytes,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = machine.facts()
    measured = measure(options, shapes)
    jobs = [(shape, _summaries(measured, shape)) for shape in shapes]
    rates = report.limit_medians(measured.limits_gb_per_s)
    found = targets.targets(jobs, rates)
    print(_text(about, measured, jobs, found))
    document = _document(options, about, measured, jobs, found)
    (options.out / "compare.json").write_text(json.dumps(document, indent=1) + "\n")
    plot.draw(jobs, options.out / "compare.png")
    print(f"\nWritten to {options.out / 'compare.json'} and compare.png")
    return 1 if measured.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compare", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true",
        help=" ".join(f"--{name.replace('_', '-')} {value}" for name, value in _QUICK.items()),
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=words, default=list(JOBS),
        help="SLICESxHOSTSxMIB of state, in 16 leaves or in as many as follow a slash;"
        f" with commas (default {','.join(JOBS)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--minutes", type=above_0, default=float("inf"),
        help="after the first round, start only rounds that should end in time",
    )  # fmt: skip
    parser.add_argument("--saves", type=positive, default=3, help="timed saves in each round")
    parser.add_argument(
        "--restores", type=some_of(SCENARIOS), default=list(SCENARIOS),
        help=f"losses before the restores, of {','.join(SCENARIOS)}",
    )  # fmt: skip
    parser.add_argument(
        "--contenders", type=some_of(MODULES), default=list(MODULES), help=f"of {','.join(MODULES)}"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument(
        "--ramdisk",
        type=Path,
        default=Path("/dev/shm"),
        help="tmpfs in which each host's ramdisk is made",
    )
    parser.add_argument(
        "--storage", type=Path, default=Path(tempfile.gettempdir()),
        help="directory in which the persistent tier is made and removed",
    )  # fmt: skip
    parser.add_argument(
        "--limits-mib",
        type=positive,
        default=256,
        help="MiB moved to measure the limits",
    )
    parser.add_argument("--timeout-s", type=above_0, default=600.0, help="for each life of a job")
    parser.add_argument("--date", help="date to record in the JSON")
    return parser


@dataclasses.dataclass(frozen=True)
class Measured:
    rounds: dict[tuple[str, str], list[dict[str, Any]]]
    """The rounds by job and contender."""
    limits_gb_per_s: list[dict[str, float]]
    failures: list[str]


def measure(options: argparse.Namespace, shapes: Sequence[Shape]) -> Measured:
    """Run all rounds of all jobs in sequence. The failure of a contender does not end the run."""
    with warm.started(IMPORTED_BY_ALL, (ROOT,)) as address:
        place = Place(options.ramdisk, options.storage, options.timeout_s, warm=address)
        return _measure(options, shapes, place)


def _measure(options: argparse.Namespace, shapes: Sequence[Shape], place: Place) -> Measured:
    measured = Measured(
        {(shape.name, name): [] for shape in shapes for name in options.contenders},
        [],
        [],
    )
    began_s = time.monotonic()
    longest_s = dict.fromkeys((shape.name for shape in shapes), 0.0)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}: limits", file=sys.stderr)
        measured.limits_gb_per_s.append(
            limits.measure(options.ramdisk, options.storage, options.limits_mib * 2**20)
            | plain_readers.measure(options.storage, options.limits_mib * 2**20)
        )
        for shape in shapes:
            start_s = time.monotonic()
            if number and start_s - began_s + longest_s[shape.name] > 60 * options.minutes:
                print(f"round {number + 1}: no time for {shape.name}", file=sys.stderr)
                continue
            # Nobody is always first, nor always after the same other.
            turn = number % len(options.contenders)
            for name in options.contenders[turn:] + options.contenders[:turn]:
                print(f"round {number + 1}: {shape.name}, {name}", file=sys.stderr)
                try:
                    round_ = run_round(name, shape, place, options.restores)
                except RoundFailed as failure:
                    print(f"compare: {failure}", file=sys.stderr)
                    measured.failures.append(f"round {number + 1}, {shape.name}: {failure}")
                else:
                    measured.rounds[shape.name, name].append(round_)
            longest_s[shape.name] = max(longest_s[shape.name], time.monotonic() - start_s)
    return measured


def _summaries(measured: Measured, shape: Shape) -> dict[str, dict[str, Any]]:
    return {
        name: report.summarize(rounds)
        for (job, name), rounds in measured.rounds.items()
        if job == shape.name
    }


def _text(
    about: dict[str, Any],
    measured: Measured,
    jobs: Sequence[tuple[Shape, dict[str, dict[str, Any]]]],
    found: Sequence[targets.Target],
) -> str:
    lines = [f"{about['cores']} cores, {about['cpu']}, {about['memory']}"]
    for shape, summaries in jobs:
        rounds = {name: len(measured.rounds[shape.name, name]) for name in summaries}
        lines += [
            "",
            f"Job {shape.name}: {shape.slices} slices of {shape.hosts_per_slice} hosts,"
            f" {shape.state_bytes / 2**20:g} MiB of state in {shape.leaves} leaves,"
            f" {shape.timed_saves} timed saves a round;"
            f" rounds: {', '.join(f'{name} {count}' for name, count in rounds.items())}",
            "",
            report.table(summaries, BASE),
        ]
    lines += ["", report.limits_table(measured.limits_gb_per_s), "", targets.table(found)]
    lines += [f"\nFailed: {failure}" for failure in measured.failures]
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        lines += ["", f"Not an idle machine (load average {load:.1f} at start): do not publish."]
    return "\n".join(lines)


def _document(
    options: argparse.Namespace,
    about: dict[str, Any],
    measured: Measured,
    jobs: Sequence[tuple[Shape, dict[str, dict[str, Any]]]],
    found: Sequence[targets.Target],
) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "date": options.date,
        "machine": about,
        "limits_gb_per_s": measured.limits_gb_per_s,
        "jobs": [
            {
                "job": dataclasses.asdict(shape)
                | {"state_bytes": shape.state_bytes, "lost_slice": LOST_SLICE},
                "contenders": {
                    name: {"summary": summary, "rounds": measured.rounds[shape.name, name]}
                    for name, summary in summaries.items()
                },
                "ratios_to_ours": report.ratios(summaries, BASE),
            }
            for shape, summaries in jobs
        ],
        "targets": [dataclasses.asdict(target) for target in found],
        "failures": measured.failures,
    }


if __name__ == "__main__":
    sys.exit(main())
