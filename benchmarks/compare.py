"""This checkpointer beside Orbax's emergency and p2p managers, and the machine's own limits.

    python benchmarks/compare.py --slices 2 --hosts-per-slice 1 --mib 1024 --rounds 3

Every contender gets the same state and job (one process per host on loopback, a ramdisk
directory per host) in fresh processes, in turn, several rounds. A round: one save to warm up,
the timed saves, one save during which training goes on with the donated state; all processes
end; slice 0 loses its ramdisks; fresh processes restore, and every shard is checked bit for bit.
README.md beside this file says what each row means.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import limits
import machine
import report
from contenders import MODULES
from job import Shape, plan_shape
from lives import LOST_SLICE, RoundFailed, run_round

BASE = "ours"
# The most that a contender keeps of each slice's state at one time.
_COPIES_ON_RAMDISK = 3
_COPIES_IN_PROCESS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        shape = plan_shape(
            options.slices, options.hosts_per_slice, options.mib, options.leaves, options.saves
        )
        one_bytes = shape.slices * shape.state_bytes
        machine.require_room(
            options.ramdisk,
            _COPIES_ON_RAMDISK * one_bytes,
            (_COPIES_ON_RAMDISK + _COPIES_IN_PROCESS) * one_bytes,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = machine.facts()
    try:
        measured = _measure(options, shape)
    except RoundFailed as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    summaries = {name: report.summarize(rounds) for name, rounds in measured.contenders.items()}
    print(_text(shape, about, summaries, measured.limits_gb_per_s))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "compare.json"
    document = {
        "schema_version": 1,
        "date": options.date,
        "machine": about,
        "job": dataclasses.asdict(shape)
        | {"state_bytes": shape.state_bytes, "rounds": options.rounds, "lost_slice": LOST_SLICE},
        "limits_gb_per_s": measured.limits_gb_per_s,
        "contenders": {
            name: {"summary": summaries[name], "rounds": rounds}
            for name, rounds in measured.contenders.items()
        },
        "ratios_to_ours": report.ratios(summaries, BASE),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nWritten to {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slices", type=_positive, default=2)
    parser.add_argument("--hosts-per-slice", type=_positive, default=1)
    parser.add_argument("--mib", type=_positive, default=1024, help="size of one copy of the state")
    parser.add_argument(
        "--leaves", type=_positive, default=16, help="arrays that the state is cut into"
    )
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--saves", type=_positive, default=3, help="timed saves in each round")
    parser.add_argument(
        "--contenders", type=_names, default=list(MODULES), help=f"of {','.join(MODULES)}"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument(
        "--ramdisk", type=Path, default=Path("/dev/shm"), help="where each host's ramdisk is made"
    )
    parser.add_argument("--limits-mib", type=_positive, default=256, help="size that limits move")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each life of a job")
    parser.add_argument("--date", help="kept in the JSON as it is given")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MODULES]:
        raise argparse.ArgumentTypeError(f"{unknown} not in {list(MODULES)}")
    return list(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class _Measured:
    contenders: dict[str, list[dict[str, Any]]]
    limits_gb_per_s: list[dict[str, float]]


def _measure(options: argparse.Namespace, shape: Shape) -> _Measured:
    measured = _Measured({name: [] for name in options.contenders}, [])
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}: limits", file=sys.stderr)
        measured.limits_gb_per_s.append(limits.measure(options.ramdisk, options.limits_mib * 2**20))
        # Nobody is always first, nor always after the same other.
        turn = number % len(options.contenders)
        for name in options.contenders[turn:] + options.contenders[:turn]:
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
            measured.contenders[name].append(
                run_round(name, shape, options.ramdisk, options.timeout_s)
            )
    return measured


def _text(
    shape: Shape,
    about: dict[str, Any],
    summaries: dict[str, dict[str, Any]],
    limit_rounds: list[dict[str, float]],
) -> str:
    lines = [
        f"{shape.slices} slices of {shape.hosts_per_slice} hosts,"
        f" {shape.state_bytes / 2**20:g} MiB of state in {shape.leaves} leaves,"
        f" {len(limit_rounds)} rounds of {shape.timed_saves} timed saves;"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        report.table(summaries, BASE),
        "",
        report.limits_table(limit_rounds),
    ]
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        lines += ["", f"Not an idle machine (load average {load:.1f} at start): do not publish."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
