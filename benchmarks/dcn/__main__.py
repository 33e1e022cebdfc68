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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, program
from benchmarks.common.job import SLICE_LOST, Shape, parse_job
from benchmarks.common.lives import Place, RoundFailed, require_room, run_round
from benchmarks.common.program import above_0, positive, positives, some_of
from benchmarks.dcn import links, report
from benchmarks.dcn.enter import host_name

NOT_POSSIBLE = 77
_ENTER = Path(__file__).with_name("enter.py")
_CONTENDERS = ("ours", "orbax-emergency", "orbax-p2p")
_QUICK = {"slices": "2,4", "mib": "16", "rounds": "1"}


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = program.parse_with_quick(parser, arguments, _QUICK)
    try:
        shapes = [parse_job(f"{slices}x1x{options.mib}", 1) for slices in options.slices]
        require_room(options.ramdisk, shapes)
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
    document = {
        "link": {"mbit": options.mbit, "delay_ms": delay_ms, "slowest": options.slowest},
        "state_bytes": shapes[0].state_bytes,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    program.publish(options, "dcn", about, _text(options, about, rows, delay_ms), document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = program.new_parser("dcn", __doc__, job_timeout_s=600.0)
    parser.add_argument("--slices", type=positives, default=[2, 4, 8], help="with commas")
    parser.add_argument("--mib", type=positive, default=64, help="state of a host, all of a slice")
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
    return parser


def _measure(
    options: argparse.Namespace, shapes: Sequence[Shape]
) -> tuple[list[report.Row], float]:
    """Return a row for each contender and number of slices, and the delay of the links."""
    rounds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    delay_ms = 0.0
    for number in range(options.rounds):
        for shape in shapes:
            for name in program.in_turn(options.contenders, number):
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
        f" {machine.text(about)}",
        "",
        report.table(rows, options.mib * 2**20 / (options.mbit * 1e6 / 8)),
    ]
    if options.slowest != 1:
        lines += ["", f"The last host's link has {options.slowest:g} of the rate."]
    if delay_ms == 0:
        lines += ["", "This kernel has no netem: the links have their rate, but no delay."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
