"""The result of one check of ``eckpt doctor``, and what is printed of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from emergency_ckpt.tools.cli.output import print_line

Status = Literal["ok", "warning", "failure"]

_WORST: tuple[Status, ...] = ("failure", "warning", "ok")


class Finding(msgspec.Struct, frozen=True):
    """One checked thing.

    Attributes:
      check: its name, one word.
      status: "failure": a job would fail at its start, or could not save or restore.
      text: the finding, one clause.
      mend: how to mend it, one sentence; empty when it is ok.
      measured: numbers with their units in their names.
    """

    check: str
    status: Status
    text: str
    mend: str = ""
    measured: Mapping[str, float] = {}


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status among the findings."""
    present: set[Status] = {finding.status for finding in findings}
    for status in _WORST:
        if status in present:
            return status
    return "ok"


def exit_status(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return 1 when a job should not start: after a failure, with ``strict`` after a warning."""
    return 0 if worst(findings) in ({"ok"} if strict else {"ok", "warning"}) else 1


def show(findings: Sequence[Finding]) -> None:
    """Print one line for each finding, and one below it that says how to mend it."""
    for finding in findings:
        print_line(f"{finding.status:8} {finding.check:10} {finding.text}")
        if finding.mend:
            print_line(f"{'':20}{finding.mend}")
    counts = {status: sum(f.status == status for f in findings) for status in _WORST}
    print_line(", ".join(f"{count} {status}" for status, count in counts.items() if count))
