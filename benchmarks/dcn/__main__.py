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
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, program
from benchmarks.common.job import SLICE_LOST, Shape, parse_job
from benchmarks.common.lives import Place, RoundFailed, require_room, run_round
from benchmarks.common.program import above_0, positive, positives, some_of
from benchmarks.common.tables import markdown, number
from benchmarks.common.traffic import RECEIVED, SENT
from benchmarks.compare.report import restore_s
from benchmarks.dcn import links
from benchmarks.dcn.enter import host_name

NOT_POSSIBLE = 77
_ENTER = Path(__file__).with_name("enter.py")
_CONTENDERS = ("ours", "orbax-emergency")
_QUICK = {"slices": "2,4", "mib": "16", "rounds": "1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender with one number of slices; medians over the rounds.

    Attributes:
      restore_s: from the first process's start to the last one's end; None if it refused.
      refused: the contender's reason.
      received_by_lost_bytes: bytes to the host that lost its ramdisk.
      sent_bytes: maximum over any one link of the other hosts.
      in_all_bytes: received bytes over all links.
    """

    contender: str
    slices: int
    restore_s: float | None
    refused: str | None = None
    received_by_lost_bytes: float = 0.0
    sent_bytes: float = 0.0
    in_all_bytes: float = 0.0


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
        rows = _measure(options, shapes)
    except links.NotPossible as problem:
        print(f"dcn: cannot be measured here: {problem}", file=sys.stderr)
        return NOT_POSSIBLE
    except RoundFailed as failure:
        print(f"dcn: {failure}", file=sys.stderr)
        return 1
    document = {
        "link": {"mbit": options.mbit, "slowest": options.slowest},
        "state_bytes": shapes[0].state_bytes,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    program.publish(options, "dcn", about, _text(options, about, rows), document)
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
        "--slowest", type=above_0, default=1.0, help="share of the rate that the last host's has"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--contenders", type=some_of(_CONTENDERS), default=list(_CONTENDERS))
    return parser


def _measure(options: argparse.Namespace, shapes: Sequence[Shape]) -> list[Row]:
    """Return a row for each contender and number of slices."""
    rounds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for turn in range(options.rounds):
        for shape in shapes:
            for name in program.in_turn(options.contenders, turn):
                print(f"round {turn + 1}: {shape.slices} slices, {name}", file=sys.stderr)
                # New links for each, so that no queue or connection is left of the one before.
                with links.linked_hosts(shape.slices, options.mbit, options.slowest) as hosts:
                    measured = _round_over(hosts, name, shape, options)
                rounds.setdefault((name, shape.slices), []).append(measured)
    return [
        row_of(name, shape, rounds[name, shape.slices])
        for name in options.contenders
        for shape in shapes
    ]


def _round_over(
    hosts: links.Links, name: str, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", prefix="eckpt-hosts-") as hosts_file:
        for host, address in enumerate(hosts.addresses):
            print(address, host_name(host), file=hosts_file)
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


def _text(options: argparse.Namespace, about: dict[str, Any], rows: Sequence[Row]) -> str:
    lines = [
        f"{options.mib} MiB of state, one host a slice, links of {options.mbit:g} Mbit/s,"
        f" {options.rounds} rounds; {machine.text(about)}",
        "",
        table(rows, options.mib * 2**20 / (options.mbit * 1e6 / 8)),
    ]
    if options.slowest != 1:
        lines += ["", f"The last host's link has {options.slowest:g} of the rate."]
    return "\n".join(lines)


def row_of(contender: str, shape: Shape, rounds: Sequence[Mapping[str, Any]]) -> Row:
    """Return the row of rounds with one host per slice, where the first host lost its ramdisk."""
    outcomes = [round_["restores"][SLICE_LOST] for round_ in rounds]
    for outcome in outcomes:
        if "refused" in outcome:
            return Row(contender, shape.slices, None, outcome["refused"])
    received = [_crossed(outcome, RECEIVED) for outcome in outcomes]
    sent = [_crossed(outcome, SENT) for outcome in outcomes]
    return Row(
        contender,
        shape.slices,
        statistics.median(restore_s(round_) for round_ in rounds),
        None,
        statistics.median(links[0] for links in received),
        statistics.median(max(links[1:]) for links in sent),
        statistics.median(map(sum, received)),
    )


def _crossed(outcome: Mapping[str, Any], direction: int) -> list[int]:
    """Return the bytes over each host's link during the restore."""
    return [result["over_links"][direction] for result in outcome["processes"]]


def table(rows: Sequence[Row], state_s: float) -> str:
    """Return Markdown. ``state_s``: time for the state of a slice over one link at full rate.

    Growth is relative to the same contender's first row; 1x means no growth.
    """
    header = [
        "one slice lost", "slices", "restore, s", "growth", "over the limit", "lost host got, MiB",
        "most another sent, MiB", "all links, MiB",
    ]  # fmt: skip
    first = {}
    lines = []
    for r in rows:
        if r.restore_s is None:
            lines.append([r.contender, str(r.slices), "cannot", *["-"] * (len(header) - 3)])
            continue
        base_s = first.setdefault(r.contender, r.restore_s)
        sizes = (r.received_by_lost_bytes, r.sent_bytes, r.in_all_bytes)
        lines.append(
            [
                *(r.contender, str(r.slices), number(r.restore_s)),
                *(f"{number(r.restore_s / base_s)}x", f"{number(r.restore_s / state_s)}x"),
                *(number(size / 2**20) for size in sizes),
            ]
        )
    refusals = [f"{r.contender} cannot, {r.slices} slices: {r.refused}" for r in rows if r.refused]
    return "\n".join([markdown([header, *lines]), *refusals])


if __name__ == "__main__":
    sys.exit(main())
