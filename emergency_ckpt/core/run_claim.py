"""Decision whether a run may save in a persistent directory, from the claim recorded there. Pure.

Two jobs that save in one directory would remove each other's steps. The directory therefore names
the run that saves there, and its newest life.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import msgspec

Claim = Literal["hold", "write", "refuse"]

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,255}")
_LIFE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that saves in a directory.

    Attributes:
      run_id: name of the run.
      from_dir: True when the name is derived from the directory, which may have been moved since.
      life: first incarnation of the newest start of the job that claimed the directory.
    """

    run_id: str
    from_dir: bool
    life: str

    def is_same_run(self, other: RunRecord) -> bool:
        """Return whether both records are of one run."""
        return self.run_id == other.run_id or (self.from_dir and other.from_dir)


def decide_claim(
    there: RunRecord | None, mine: RunRecord, known: Collection[str] = (), *, held: bool = False
) -> tuple[Claim, str]:
    """Return what ``mine`` does (hold the claim, write it, or refuse to start) and the reason.

    Of two lives of one run the newer one wins: it may be the restart of a job that hangs.

    Args:
      known: lives of this run that are over, independent of their clocks.
      held: ``mine`` was recorded; a life that replaced it is newer, independent of its clock.
    """
    if there is None:
        return "write", "no run has saved there"
    if not there.is_same_run(mine):
        return "refuse", f"run {there.run_id!r} saves there, and this is run {mine.run_id!r}"
    if there == mine:
        return "hold", "this life is recorded there"
    is_over = there.life in known or there.life < mine.life
    if there.life == mine.life or (is_over and not held):
        return "write", f"incarnation {there.life} of this run is over"
    return "refuse", (
        f"another job with this run's name, {there.run_id!r}, saves there: its incarnation "
        f"{there.life} is newer than {mine.life} of this one"
    )


def problem_of(record: RunRecord) -> str:
    """Return the fault of a record from storage; empty when it is valid."""
    if _RUN_ID.fullmatch(record.run_id) is None:
        return "its run_id is not a valid run name"
    return "" if _LIFE.fullmatch(record.life) else "its life is not an incarnation"
