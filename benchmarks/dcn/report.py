"""One row for each number of slices from the figures of each host. Pure."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.job import SLICE_LOST, Shape
from benchmarks.common.tables import markdown, number
from benchmarks.common.traffic import RECEIVED, SENT, over_links
from benchmarks.compare.report import restore_s


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender with one number of slices; medians over the rounds.

    Attributes:
      restore_s: from the first process's start to the last one's end; None if it refused.
      refused: the contender's reason.
      received_by_lost_bytes: bytes to the host that lost its ramdisk.
      received_by_others_bytes, sent_bytes: maximum over any one link of the other hosts.
      in_all_bytes: received bytes over all links.
    """

    contender: str
    slices: int
    restore_s: float | None
    refused: str | None = None
    received_by_lost_bytes: float = 0.0
    received_by_others_bytes: float = 0.0
    sent_bytes: float = 0.0
    in_all_bytes: float = 0.0


def row(contender: str, shape: Shape, rounds: Sequence[Mapping[str, Any]]) -> Row:
    """Return the row of rounds with one host per slice, the first of which lost its ramdisk."""
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
        statistics.median(max(links[1:]) for links in received),
        statistics.median(max(links[1:]) for links in sent),
        statistics.median(map(sum, received)),
    )


def _crossed(outcome: Mapping[str, Any], direction: int) -> list[int]:
    """Return the bytes over each host's link during the restore."""
    return [
        over_links(result["traffic_before"], result["traffic_after"], direction)
        for result in outcome["processes"]
    ]


def table(rows: Sequence[Row], state_s: float) -> str:
    """Return Markdown. ``state_s``: time for the state of a slice over one link at full rate.

    Growth is relative to the same contender's first row; 1x means no growth.
    """
    header = [
        "one slice lost", "slices", "restore, s", "growth", "over the limit", "lost host got, MiB",
        "most another got, MiB", "most another sent, MiB", "all links, MiB",
    ]  # fmt: skip
    first = {}
    lines = []
    for r in rows:
        if r.restore_s is None:
            lines.append([r.contender, str(r.slices), "cannot", *["-"] * (len(header) - 3)])
            continue
        base_s = first.setdefault(r.contender, r.restore_s)
        sizes = (r.received_by_lost_bytes, r.received_by_others_bytes, r.sent_bytes, r.in_all_bytes)
        lines.append(
            [
                *(r.contender, str(r.slices), number(r.restore_s)),
                *(f"{number(r.restore_s / base_s)}x", f"{number(r.restore_s / state_s)}x"),
                *(number(size / 2**20) for size in sizes),
            ]
        )
    refusals = [f"{r.contender} cannot, {r.slices} slices: {r.refused}" for r in rows if r.refused]
    return "\n".join([markdown([header, *lines]), *refusals])
