"""What a restore makes of a prefetch: use it, do without it, or tell what went wrong. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

_AT_MOST = 4


class PrefetchReport(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, array_like=True
):
    """What one process says of its prefetch when it is asked to restore.

    Attributes:
      kind: ``none``: it has made none since the last restore. ``ready``: it is what is asked for,
        and lies in memory. ``unfit``: it is not what is asked for, or not any more. ``failed``.
      number: which prefetch of this life.
      reason: why it is unfit, or how it failed.
    """

    kind: Literal["none", "ready", "unfit", "failed"] = "none"
    number: int = -1
    reason: str = ""


class PrefetchUse(msgspec.Struct, frozen=True):
    """The decision for all processes, and why.

    Attributes:
      kind: ``use`` what was prefetched; ``restore`` as if there had been none; ``fail``: a
        prefetch failed, and nobody has been told yet.
    """

    kind: Literal["use", "restore", "fail"]
    reason: str = ""


def decide_prefetch(reports: Mapping[int, PrefetchReport]) -> PrefetchUse:
    """Return one decision from the reports of all processes, by process index.

    A failure comes first: it is never lost, even where another state is asked for. What was
    prefetched is used only when every process has the same prefetch.
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
        told = f"not by the processes {others[:8]}" if others else "not the same one everywhere"
        return PrefetchUse("restore", told)
    return PrefetchUse("restore")
