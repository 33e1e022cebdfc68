"""The steps that one process knows to be complete, and the identities of its next saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.types import LOCAL, SaveId, TierName

_AFTER_REMOVAL = 1000
"""Added to the number of a demand for each removal of its step."""


class SavedSteps:
    """Steps found at a restore or survey, and saved since. For the training thread.

    ``steps`` of each tier's saves has them: equal on all processes that have no save under way.
    """

    def __init__(
        self,
        saves: Mapping[TierName, LocalSaves | PersistentSaves],
        incarnation: str,
        run_id: str,
    ) -> None:
        self._saves = saves
        self._incarnation = incarnation
        self._run_id = run_id
        self._forced = (-1, 0)
        self._removed: Counter[int] = Counter()
        self.restored: SaveId | None = None

    @property
    def incarnation(self) -> str:
        """The incarnation of the next save."""
        return self._incarnation

    def start_from(self, save: SaveId, incarnation: str, tier: TierName) -> None:
        """Go on from ``save``, restored from ``tier``, under ``incarnation``."""
        self._incarnation = incarnation
        self._forced = (-1, 0)
        self.restored = save
        for name, saves in self._saves.items():
            if name in (LOCAL, tier):
                saves.steps = tuple(sorted({*saves.steps, save.step}))

    def note_found(self, steps: Mapping[TierName, Sequence[int]]) -> None:
        """After a survey: the steps of each tier, oldest first."""
        for name, saves in self._saves.items():
            saves.steps = tuple(steps.get(name, ()))

    def forget_newer(self, step: int) -> None:
        """Leave out the steps newer than ``step``, which was restored."""
        for saves in self._saves.values():
            saves.steps = tuple(each for each in saves.steps if each <= step)

    def of(self, name: TierName) -> tuple[int, ...]:
        """Return the steps that a tier has complete, oldest first; none where it does not save."""
        return self._saves[name].steps if name in self._saves else ()

    def newest(self) -> int | None:
        """Return the newest complete step, found, restored or saved; None without any."""
        return max((step for name in self._saves for step in self.of(name)), default=None)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        self._removed[step] += 1
        for saves in self._saves.values():
            saves.steps = tuple(each for each in saves.steps if each != step)

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
