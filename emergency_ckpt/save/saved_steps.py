"""The steps that one process knows to be whole, and the identities of its next saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, TierName

_AFTER_REMOVAL = 1000
"""Added to the number of a demand for each removal of its step."""


class SavedSteps:
    """Steps found at a restore or survey, and saved since. For the training thread."""

    def __init__(
        self, local: LocalSaves, persistent: PersistentSaves | None, incarnation: str, run_id: str
    ) -> None:
        self._local = local
        self._persistent = persistent
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
        if self._persistent is not None:
            self._persistent.restart()

    def note_found(self, newest: Mapping[TierName, int]) -> None:
        """After a survey: the newest step of each tier."""
        self._found = dict(newest)

    def holds(self, name: TierName, step: int) -> bool:
        """Return whether the tier has ``step`` whole: found by a restore or survey, or saved."""
        complete = self._complete(name)
        return self._found.get(name) == step or (complete is not None and complete.step == step)

    def newest(self) -> int | None:
        """The newest step that was saved whole or restored in this life; None before the first."""
        complete = (self._complete(LOCAL), self._complete(PERSISTENT))
        return max((save.step for save in complete if save is not None), default=None)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        self._removed[step] += 1
        self._found = {name: found for name, found in self._found.items() if found != step}
        complete = self._complete(LOCAL)
        if complete is not None and complete.step == step:
            self._local.restart_from(None)
        complete = self._complete(PERSISTENT)
        if self._persistent is not None and complete is not None and complete.step == step:
            self._persistent.restart()

    def _complete(self, name: TierName) -> SaveId | None:
        saves = self._local if name == LOCAL else self._persistent
        return None if saves is None else saves.last_complete

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
