"""The steps that one process knows to be complete, and the identities of its next saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.types import LOCAL, SaveId, TierName

_AFTER_REMOVAL = 1000
"""Added to the number of a demand for each removal of its step."""


class SavedSteps:
    """Steps found at a restore or survey, and saved since. For the training thread."""

    def __init__(
        self,
        saves: Mapping[TierName, LocalSaves | PersistentSaves],
        incarnation: str,
        run_id: str,
    ) -> None:
        self._saves = saves
        self._incarnation = incarnation
        self._run_id = run_id
        self._found: dict[TierName, int] = {}
        self._forced = (-1, 0)
        self._removed: Counter[int] = Counter()
        self.restored: SaveId | None = None

    @property
    def incarnation(self) -> str:
        """The incarnation of the next save."""
        return self._incarnation

    def start_from(self, save: SaveId, incarnation: str, tier: TierName) -> None:
        """Go on from ``save``, restored from ``tier``, under ``incarnation``.

        What was saved before it may be behind it.
        """
        self._incarnation = incarnation
        self._forced = (-1, 0)
        self.restored = save
        self._found = {LOCAL: save.step, tier: save.step}
        for saves in self._saves.values():
            saves.restart_from(save)

    def note_found(self, newest: Mapping[TierName, int]) -> None:
        """After a survey: the newest step of each tier."""
        self._found = dict(newest)

    def holds(self, name: TierName, step: int) -> bool:
        """Return whether the tier has ``step`` whole: found by a restore or survey, or saved."""
        return step in (self._found.get(name), self._complete_step(name))

    def newest(self) -> int | None:
        """The newest step that is complete or was restored in this life; None before the first."""
        steps = map(self._complete_step, self._saves)
        return max((step for step in steps if step is not None), default=None)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        self._removed[step] += 1
        self._found = {name: found for name, found in self._found.items() if found != step}
        for saves in self._saves.values():
            saves.forget(step)

    def _complete_step(self, name: TierName) -> int | None:
        complete = self._saves[name].last_complete
        return None if complete is None else complete.step

    def identity(self, step: int, *, forced: bool) -> SaveId:
        """The identity of the next save.

        A step can be forced that was saved before, or saved again after its removal, and the
        bytes may be others by then. They must never be put together, so each demand for a step is
        of an incarnation of its own: alike on all processes, which all make the same demands.
        """
        number = _AFTER_REMOVAL * self._removed[step]
        if forced:
            before, count = self._forced
            self._forced = step, (count if step == before else 0) + 1
            number += self._forced[1]
        name = f"{self._incarnation}.{number:06d}" if number else self._incarnation
        return SaveId(step, name, self._run_id)
