"""The newest step of RAM at the end of a run: whether storage gets it too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from emergency_ckpt.types import SaveId


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

    ``last``: the step of the last call of ``save``; None without one. ``reason``: as above.
    """
    if last is None or (stored is not None and stored >= last):
        return ""
    newest = "none" if stored is None else str(stored)
    text = f"the newest step in storage is {newest}, in RAM {'none' if in_ram is None else in_ram}"
    if in_ram is not None and (stored is None or in_ram > stored):
        text += f", which is lost with its hosts ({reason or 'it was not written'})"
    return f"{text}: end the loop with save(..., force=True)"
