"""Decision about a prefetch at a restore: use it, do without it, or report its failure. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

_AT_MOST = 4


class PrefetchReport(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, array_like=True
):
    """One process's report on its prefetch, at a restore.

    Attributes:
      kind: ``none``: no prefetch since the last restore. ``ready``: it fits the request and is in
        memory. ``unfit``: it does not fit the request, or no longer. ``failed``.
      number: number of the prefetch in this life.
      reason: why it is unfit or failed.
    """

    kind: Literal["none", "ready", "unfit", "failed"] = "none"
    number: int = -1
    reason: str = ""


class PrefetchUse(msgspec.Struct, frozen=True):
    """The decision for all processes, and why.

    Attributes:
      kind: ``use`` the prefetch; ``restore`` as if there had been none; ``fail``: the prefetch
        failed and the caller has not seen the error yet.
    """

    kind: Literal["use", "restore", "fail"]
    reason: str = ""


def decide_prefetch(reports: Mapping[int, PrefetchReport]) -> PrefetchUse:
    """Return one decision from the reports of all processes, by process index.

    A failure has precedence, so that it is never lost, even when another state is requested. A
    prefetch is used only when every process has the same one.
    """
    ordered = sorted(reports.items())
    failed = [f"process {p}: {report.reason}" for p, report in ordered if report.kind == "failed"]
    if failed:
        return PrefetchUse("fail", "; ".join(failed[:_AT_MOST]))
    ready = [p for p, report in ordered if report.kind == "ready"]
    numbers = {report.number for report in reports.values() if report.kind == "ready"}
    if ready and len(ready) == len(reports) and len(numbers) == 1:
        return PrefetchUse("use")
    unfit = [f"process {p}: {report.reason}" for p, report in ordered if report.kind == "unfit"]
    if unfit:
        return PrefetchUse("restore", "; ".join(unfit[:_AT_MOST]))
    if ready:
        others = [p for p, report in ordered if report.kind == "none"]
        told = f"not by the processes {others[:8]}" if others else "not the same on all processes"
        return PrefetchUse("restore", told)
    return PrefetchUse("restore")
