"""Restore one lost slice of 2, 4 and 8 over links that imitate a host's data-center network.

    python -m benchmarks.dcn --slices 2,4,8 --mib 64 --mbit 500

Each slice is one host: a network namespace with its own link to one switch. The job saves and ends,
slice 0 loses its ramdisk, and fresh processes restore. Prints the time of the restore and the bytes
over each link for this checkpointer and Orbax's emergency manager; neither should grow with the
number of slices. With ``--slowest 0.1`` the last host's link has a tenth of the rate. Needs Linux,
root, iproute2 and util-linux; if one is missing, the program reports it and exits with status 77.
benchmarks/README.md explains the measurements.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.common.arguments import above_0, parse_with_quick, positive, positives, some_of
from benchmarks.common.job import SLICE_LOST, Shape, plan_shape
from benchmarks.common.lives import Place, RoundFailed, run_round
from benchmarks.dcn import links, report
from benchmarks.dcn.enter import host_name

NOT_POSSIBLE = 77
_ENTER = Path(__file__).with_name("enter.py")
_CONTENDERS = ("ours", "orbax-emergency", "orbax-p2p")
_QUICK: dict[str, Any] = {"slices": [2, 4], "mib": 16, "rounds": 1}
_COPIES_ON_RAMDISK = 4
_COPIES_IN_PROCESS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parse_with_quick(parser, arguments, _QUICK)
    try:
        shapes = [plan_shape(n, 1, options.mib, options.leaves, 1) for n in options.slices]
        one_bytes = max(shape.slices * shape.state_bytes for shape in shapes)
        in_all = _COPIES_ON_RAMDISK + _COPIES_IN_PROCESS
        machine.require_room(options.ramdisk, _COPIES_ON_RAMDISK * one_bytes, in_all * one_bytes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    about = machine.facts()
    try:
        rows, delay_ms = _measure(options, shapes)
    except links.NotPossible as problem:
        print(f"dcn: cannot be measured here: {problem}", file=sys.stderr)
        return NOT_POSSIBLE
    except RoundFailed as failure:
        print(f"dcn: {failure}", file=sys.stderr)
        return 1
    print(_text(options, about, rows, delay_ms))
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "schema_version": 1,
        "date": options.date,
        "machine": about,
        "link": {"mbit": options.mbit, "delay_ms": delay_ms, "slowest": options.slowest},
        "state_bytes": shapes[0].state_bytes,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (options.out / "dcn.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nWritten to {options.out / 'dcn.json'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.dcn", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="--slices 2,4 --mib 16 --rounds 1: about two minutes"
    )
    parser.add_argument("--slices", type=positives, default=[2, 4, 8], help="with commas")
    parser.add_argument("--mib", type=positive, default=64, help="state of a host, all of a slice")
    parser.add_argument("--leaves", type=positive, default=16)
    parser.add_argument(
        "--mbit", type=above_0, default=500.0,
        help="rate of each direction of each link; 500 is 1/400 of 25 GB/s",
    )  # fmt: skip
    parser.add_argument(
        "--delay-ms", type=above_0, default=0.5, help="delay of each direction of each link"
    )
    parser.add_argument(
        "--slowest", type=above_0, default=1.0, help="share of the rate that the last host's has"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--contenders", type=some_of(_CONTENDERS),
        default=["ours", "orbax-emergency"], help=f"of {','.join(_CONTENDERS)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout-s", type=above_0, default=600.0, help="for each life of a job")
    parser.add_argument("--date", help="date to record in the JSON")
    return parser


def _measure(
    options: argparse.Namespace, shapes: Sequence[Shape]
) -> tuple[list[report.Row], float]:
    """Return a row for each contender and number of slices, and the delay of the links."""
    rounds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    delay_ms = 0.0
    for number in range(options.rounds):
        for shape in shapes:
            turn = number % len(options.contenders)
            for name in options.contenders[turn:] + options.contenders[:turn]:
                print(f"round {number + 1}: {shape.slices} slices, {name}", file=sys.stderr)
                # New links for each, so that no queue or connection is left of the one before.
                with links.linked_hosts(
                    shape.slices, options.mbit, options.delay_ms, options.slowest
                ) as hosts:
                    measured = _round_over(hosts, name, shape, options)
                delay_ms = hosts.delay_ms
                rounds.setdefault((name, shape.slices), []).append(measured)
    rows = [
        report.row(name, shape, rounds[name, shape.slices])
        for name in options.contenders
        for shape in shapes
    ]
    return rows, delay_ms


def _round_over(
    hosts: links.Links, name: str, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", prefix="eckpt-hosts-") as hosts_file:
        for number, address in enumerate(hosts.addresses):
            print(address, host_name(number), file=hosts_file)
        print("127.0.0.1 localhost", file=hosts_file, flush=True)
        place = Place(
            ramdisks=options.ramdisk,
            storage=options.ramdisk,
            timeout_s=options.timeout_s,
            launcher=(
                *(sys.executable, str(_ENTER)),
                *(hosts.namespaces[0].removesuffix("0"), hosts_file.name),
            ),
            bind_host=None,
        )
        return run_round(name, shape, place, [SLICE_LOST])


def _text(
    options: argparse.Namespace, about: dict[str, Any], rows: Sequence[report.Row], delay_ms: float
) -> str:
    lines = [
        f"{options.mib} MiB of state, one host a slice, links of {options.mbit:g} Mbit/s and"
        f" {delay_ms:g} ms each way, {options.rounds} rounds;"
        f" {about['cores']} cores, {about['cpu']}, {about['memory']}",
        "",
        report.table(rows, options.mib * 2**20 / (options.mbit * 1e6 / 8)),
    ]
    if options.slowest != 1:
        lines += ["", f"The last host's link has {options.slowest:g} of the rate."]
    if delay_ms == 0:
        lines += ["", "This kernel has no netem: the links have their rate, but no delay."]
    if (load := about["load_average_at_start"]) > machine.IDLE_LOAD:
        lines += ["", f"Not an idle machine (load average {load:.1f} at start): do not publish."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
