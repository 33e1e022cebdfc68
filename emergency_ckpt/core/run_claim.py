"""Whether a run may save in a persistent directory, by what lies there about the run that does.

Two jobs that save in one directory remove each other's steps. So the run that saves there, and its
newest life, are on record in it. Pure.
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
    """Who saves in a directory.

    Attributes:
      run_id: name of the run.
      from_dir: whether that is derived from the directory, which may have been moved since.
      life: the newest start of the job that saved there, or was about to: its first incarnation.
    """

    run_id: str
    from_dir: bool
    life: str

    def is_same_run(self, other: RunRecord) -> bool:
        """Whether both are of one run."""
        return self.run_id == other.run_id or (self.from_dir and other.from_dir)


def decide_claim(
    there: RunRecord | None, mine: RunRecord, known: Collection[str] = (), *, held: bool = False
) -> tuple[Claim, str]:
    """Return ``mine``'s move (go on, write itself, or leave the directory alone) and the reason.

    Of two lives of one run the newer one goes on: it may be the restart of a job that has hung.

    Args:
      known: lives of this run that are over, whatever their clocks said.
      held: ``mine`` was on record; a life that took its place is newer, whatever its clock said.
    """
    if there is None:
        return "write", "no run has saved there"
    if not there.is_same_run(mine):
        return "refuse", f"run {there.run_id!r} saves there, and this is run {mine.run_id!r}"
    if there == mine:
        return "hold", "it is on record"
    is_over = there.life in known or there.life < mine.life
    if there.life == mine.life or (is_over and not held):
        return "write", f"incarnation {there.life} of this run is over"
    return "refuse", (
        f"another job with this run's name, {there.run_id!r}, saves there: its incarnation "
        f"{there.life} is newer than {mine.life} of this one"
    )


def problem_of(record: RunRecord) -> str:
    """Return the fault of a record from outside; empty when it has none."""
    if _RUN_ID.fullmatch(record.run_id) is None:
        return "its run_id is no name of a run"
    return "" if _LIFE.fullmatch(record.life) else "its life is none"
