"""The result of one check of ``eckpt doctor``, and what is printed of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from rich.console import Console

from emergency_ckpt.core.wording import printable

Status = Literal["ok", "warning", "failure"]

_STYLES: Mapping[Status, str] = {"ok": "green", "warning": "yellow", "failure": "bold red"}
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


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print one line for each finding, and one below it that says how to mend it."""
    for finding in findings:
        status = f"[{_STYLES[finding.status]}]{finding.status:8}[/]"
        console.print(f"{status} {finding.check:10} ", end="")
        console.print(printable(finding.text), markup=False, soft_wrap=True)
        if finding.mend:
            console.print(f"{'':20}{printable(finding.mend)}", markup=False, soft_wrap=True)
    counts = {status: sum(f.status == status for f in findings) for status in _WORST}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
