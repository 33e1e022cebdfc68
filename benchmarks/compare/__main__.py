"""Compare this checkpointer with Orbax's emergency and p2p managers and with plain Orbax.

    python -m benchmarks.compare [--quick] [--jobs 2x1x1024,2x1x125/2000] [--rounds 3]

All contenders run the same job with the same state, in turn and in fresh processes, for several
rounds: one process per host on loopback, a ramdisk directory per host, one directory as storage. In
a round a contender saves to RAM and to storage and all processes end; then, for each loss, fresh
processes restore and compare every shard bit for bit. The machine's own limits are measured as
well. Writes compare.json. benchmarks/README.md explains each row.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import limits, machine, program
from benchmarks.common.contenders import MODULES
from benchmarks.common.job import SCENARIOS, Shape, parse_job
from benchmarks.common.lives import Place, RoundFailed, require_room, run_round
from benchmarks.common.program import above_0, positive, some_of
from benchmarks.compare import report, targets

JOBS = "2x1x1024,2x2x512,4x1x256,2x1x125/2000"
_QUICK = {
    "jobs": "2x1x64",
    "rounds": "1",
    "saves": "2",
    "restores": "slice,storage",
    "limits_mib": "64",
}


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = program.parse_with_quick(parser, arguments, _QUICK)
    try:
        shapes = [parse_job(job, options.saves) for job in options.jobs]
        require_room(options.ramdisk, shapes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = machine.facts()
    place = Place(options.ramdisk, options.storage, options.timeout_s)
    measured = _measure(options, shapes, place)
    jobs = [_job(measured, shape) for shape in shapes]
    rates = report.limit_medians(measured.limits_gb_per_s)
    found = targets.targets(zip(shapes, jobs, strict=True), rates)
    document = {
        "limits_gb_per_s": measured.limits_gb_per_s,
        "jobs": jobs,
        "targets": [dataclasses.asdict(target) for target in found],
        "failures": measured.failures,
    }
    text = _text(about, measured, jobs, found)
    program.publish(options, "compare", about, text, document)
    return 1 if measured.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = program.new_parser("compare", __doc__, job_timeout_s=600.0)
    parser.add_argument(
        "--jobs", type=program.words, default=JOBS,
        help="SLICESxHOSTSxMIB of state, in 16 leaves or in as many as follow a slash;"
        f" with commas (default {JOBS})",
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
    parser.add_argument(
        "--storage", type=Path, default=Path(tempfile.gettempdir()),
        help="directory in which the persistent tier is made and removed",
    )  # fmt: skip
    parser.add_argument(
        "--limits-mib", type=positive, default=256, help="MiB moved to measure the limits"
    )
    return parser


@dataclasses.dataclass(frozen=True)
class Measured:
    rounds: dict[tuple[str, str], list[dict[str, Any]]]
    """The rounds by job and contender."""
    limits_gb_per_s: list[dict[str, float]]
    failures: list[str]


def _measure(options: argparse.Namespace, shapes: Sequence[Shape], place: Place) -> Measured:
    """Run all rounds of all jobs in sequence. The failure of a contender does not end the run."""
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
        )
        for shape in shapes:
            start_s = time.monotonic()
            if number and start_s - began_s + longest_s[shape.name] > 60 * options.minutes:
                print(f"round {number + 1}: no time for {shape.name}", file=sys.stderr)
                continue
            for name in program.in_turn(options.contenders, number):
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


def _job(measured: Measured, shape: Shape) -> dict[str, Any]:
    """Return a job's part of the document."""
    return {
        "job": dataclasses.asdict(shape) | {"name": shape.name, "state_bytes": shape.state_bytes},
        "contenders": {
            name: {"summary": report.summarize(rounds), "rounds": rounds}
            for (job, name), rounds in measured.rounds.items()
            if job == shape.name
        },
    }


def _text(
    about: Mapping[str, Any],
    measured: Measured,
    jobs: Sequence[Mapping[str, Any]],
    found: Sequence[targets.Target],
) -> str:
    rounds = [f"{job} {name} {len(some)}" for (job, name), some in measured.rounds.items()]
    return "\n\n".join(
        [
            f"{machine.text(about)}; medians, and in brackets how many times ours.",
            report.table(jobs),
            f"Rounds: {', '.join(rounds)}.",
            report.limits(measured.limits_gb_per_s),
            targets.table(found),
            *(f"Failed: {failure}" for failure in measured.failures),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
