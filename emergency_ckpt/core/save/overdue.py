"""A preemption notice and the time that a job has for it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

_PART_TO_BRING = 0.5
"""Processes agree on a notice within a third of the grace; what is left must do for storage."""
_PART_TO_TELL = 0.9
_PART_WHEN_LATE = 1 / 3

Overdue = Literal["", "bring", "tell"]


def deadline_of(noticed_s: float, grace_s: float, reached_s: float) -> float:
    """Return until when the saves of a notice may take, on the clock of the arguments.

    The grace period is an estimate of when the process is killed. A loop that comes to act on the
    notice after it, and lives, has a third of the period all the same.

    Args:
      noticed_s: when the notice came.
      reached_s: when the loop came to act on it.
    """
    return max(noticed_s + grace_s, reached_s + _PART_WHEN_LATE * grace_s)


def overdue_work(since_s: float, grace_s: float, done: Collection[Overdue]) -> Overdue:
    """Return what is to be done about a notice that no loop has acted on; empty for nothing.

    First the newest step of RAM is brought to storage, in time before the grace is over. Then the
    log says that the loop's present step is not saved, before the process can be killed.

    Args:
      since_s: seconds since the notice.
      done: what was done already.
    """
    if since_s >= _PART_TO_TELL * grace_s and "tell" not in done:
        return "tell"
    if since_s >= _PART_TO_BRING * grace_s and not done:
        return "bring"
    return ""


def missed_text(
    since_s: float, in_ram: int | None, stored: int | None, *, has_storage: bool
) -> str:
    """Return the error about a notice that no loop has acted on."""
    ram = "none" if in_ram is None else f"step {in_ram}"
    storage = (
        f", in storage {'none' if stored is None else f'step {stored}'}" if has_storage else ""
    )
    return (
        f"a preemption notice came {since_s:.0f} s ago, and this process's loop has not come to a"
        f" call of save since: its present step is not saved. The newest in RAM is {ram}{storage}."
        " Call save after every step, and reached_preemption also within a long evaluation"
    )
