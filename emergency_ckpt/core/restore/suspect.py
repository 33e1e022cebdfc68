"""A save from which lives begin and soon end, one after the other. Pure.

The chain does not tell: a restore of the newest step is in it only from its first complete save on.
So each restore is counted, in RAM's ledgers and, where the step came from storage, in its log.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.types import SaveId

SUSPECT_LIVES = 3
"""So many lives in a row make a save suspect, where the user says nothing else."""


class RestoredSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """``lives`` in a row began from ``save``, and none of them completed a newer one."""

    save: SaveId
    lives: int


def lives_from(save: SaveId, records: Iterable[RestoredSave]) -> int:
    """Return how many lives in a row began from ``save``, by who knows of most."""
    return max((each.lives for each in records if each.save == save), default=0)


def newest_older(
    stored: Iterable[PersistentStep], below: int, timeline: Timeline | None
) -> int | None:
    """Return the newest step of storage before ``below`` that may be restored; None without any."""
    steps = (
        each.step
        for each in stored
        if each.step < below
        and not each.problem
        and not (timeline and timeline.rejection_reason(each.step, each.incarnation))
    )
    return max(steps, default=None)


def suspicion(suspect: RestoredSave, reached: int, older: int | None, limit: int | None) -> str:
    """Return what is told of a suspect save, and what becomes of it.

    Args:
      reached: the newest step that a holder has a part of.
      older: the step that is restored instead; None: the suspect is, once more.
      limit: the setting ``suspect_lives``.
    """
    step = suspect.save.step
    began = count_text(suspect.lives, "life in a row", "lives in a row")
    came = f", the last came to step {reached} or further" if reached > step else ""
    if older is not None:
        then = f"step {older} of storage is restored instead"
    elif limit is None:
        then = "it is restored again, as suspect_lives is not set"
    else:
        then = "it is restored again: storage has no older step"
    return f"{began} ended before a newer save than step {step} was complete{came}; {then}"
