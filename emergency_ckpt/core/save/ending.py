"""The end of a run: RAM's newest step in storage, and a notice that no loop acts on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from emergency_ckpt.types import SaveId

_PART_TO_BRING = 0.5
"""Processes agree on a notice within a third of the grace; what is left must do for storage."""
_PART_TO_TELL = 0.9
_PART_WHEN_LATE = 1 / 3

Overdue = Literal["", "bring", "tell"]


def deadline_of(noticed_s: float, grace_s: float, reached_s: float) -> float:
    """Return the time until which the saves of a notice may take, on the clock of the arguments.

    The grace period is an estimate of when the process is killed. A loop that acts on the notice
    (at ``reached_s``) after the period, and lives, has a third of the period all the same.
    """
    return max(noticed_s + grace_s, reached_s + _PART_WHEN_LATE * grace_s)


def overdue_work(since_s: float, grace_s: float, done: Collection[Overdue]) -> Overdue:
    """Return what is to be done about a notice that no loop has acted on; empty for nothing.

    First the newest step of RAM is brought to storage, in time before the grace is over. Then the
    log says that the loop's present step is not saved, before the process can be killed.
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


def step_for_storage(
    complete: SaveId | None,
    stored: int | None,
    rejection: str,
    writers: Sequence[int],
    *,
    is_paced: bool,
) -> tuple[SaveId | None, str]:
    """Return the save that storage is to get at a normal end, else None; and why there is none.

    Args:
      complete: the newest save that the RAM of all processes has; None without one.
      stored: the newest step in storage that counts; None without one.
      rejection: why ``complete`` does not count, as when it was rolled back; empty when it does.
      writers: the processes whose RAM can write the step; empty where no such group exists.
      is_paced: saves to storage come at intervals. Otherwise the user names their steps.

    The reason is empty where storage lacks nothing that RAM has.
    """
    if complete is None:
        return None, "RAM has no complete step"
    if stored is not None and stored >= complete.step:
        return None, ""
    if rejection:
        return None, f"step {complete.step} in RAM does not count: {rejection}"
    if not is_paced:
        return None, "save_every has no interval: policies choose the steps that storage gets"
    if not writers:
        return None, (
            f"step {complete.step} cannot be written from RAM: no slice keeps all of the state"
            " that it holds"
        )
    return complete, ""


def unstored_text(last: int | None, stored: int | None, in_ram: int | None, reason: str) -> str:
    """Return the warning where storage lacks the last step of a run; empty where it has it.

    ``last``: the last step of the loop; None without one. ``reason``: as above.
    """
    if last is None or (stored is not None and stored >= last):
        return ""
    newest = "none" if stored is None else str(stored)
    text = f"the newest step in storage is {newest}, in RAM {'none' if in_ram is None else in_ram}"
    if in_ram is not None and (stored is None or in_ram > stored):
        text += f", which is lost with its hosts ({reason or 'it was not written'})"
    return f"{text}: end the loop with save(..., force=True)"
