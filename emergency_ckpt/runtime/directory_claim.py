"""This run's hold on its persistent directory: without it nothing is saved or removed there."""

from __future__ import annotations

import threading

from absl import logging

from emergency_ckpt.core.run_claim import RunRecord, decide_claim
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.run_record import RunFile

_ATTEMPTS = 3


class DirectoryClaim:
    """Writes this run's name into the directory, and sees that it stays. For any thread; blocks.

    Args:
      from_dir: whether ``run_id`` is derived from the directory.
      take_over: put this run in place of another one, once.
    """

    def __init__(
        self, tier: PersistentTier, run_id: str, *, from_dir: bool, take_over: bool = False
    ) -> None:
        self._tier = tier
        self._run_id = run_id
        self._from_dir = from_dir
        self._lock = threading.Lock()
        self._may_take_over = take_over
        self._over: frozenset[str] = frozenset()
        self._life = ""

    def look(self, deadline_s: float) -> PersistentTierError | None:
        """At a start: why this run may not save there, or None. CorruptData, PersistentTierError.

        The life that is found there is over then, if it is one of this run.
        """
        there, refusal = self._look(deadline_s)
        if there is not None and refusal is None:
            with self._lock:
                self._over |= {there.life}
        return refusal

    def _look(self, deadline_s: float) -> tuple[RunRecord | None, PersistentTierError | None]:
        """What is there, and why a run of this name may not save beside it."""
        if self._may_take_over:
            return None, None
        there = RunFile(self._tier.storage).read(deadline_s)
        if there is None:
            return None, None
        mine = RunRecord(self._run_id, self._from_dir, there.life)
        what, reason = decide_claim(there, mine)
        return there, self._refusal(reason) if what == "refuse" else None

    def hold(self, life: str, tier: PersistentTier | None = None) -> None:
        """Return when the directory names this run and ``life``; ``tier``: with other deadlines.

        PersistentTierError when another run saves there, or a newer life of this one.
        """
        file = RunFile((tier or self._tier).storage)
        mine = RunRecord(self._run_id, self._from_dir, life)
        for _ in range(_ATTEMPTS):
            there, damage = self._read(file)
            what, reason = decide_claim(there, mine, self._over)
            if damage is not None:
                what, reason = "refuse", f"nobody can say which run saves there: {damage}"
            if what == "hold":
                self._note_held(life)
                return
            if what == "refuse":
                if not self._may_take_over:
                    raise self._refusal(reason) from damage
                logging.warning("%s is taken over: %s", self._tier.directory, reason)
            if there is None and damage is None:
                file.create(mine)
            else:
                file.replace(mine)
        raise self._refusal("others write their names there at the same time")

    def renew(self) -> None:
        """As ``hold``, for the life that holds it. Before what cannot be undone."""
        with self._lock:
            life = self._life
        if life:
            self.hold(life)
            return
        _, refusal = self._look(self._tier.storage.deadline_s(None))
        if refusal is not None:
            raise refusal

    def _note_held(self, life: str) -> None:
        with self._lock:
            if self._life and self._life != life:
                self._over |= {self._life}
            self._life = life
            self._may_take_over = False

    def _read(self, file: RunFile) -> tuple[RunRecord | None, CorruptData | None]:
        try:
            return file.read(), None
        except CorruptData as error:
            return None, error

    def _refusal(self, reason: str) -> PersistentTierError:
        file = RunFile(self._tier.storage).target
        return PersistentTierError(
            "save in",
            self._tier.directory,
            reason,
            hint="give this job a dir of its own, or save_every_n_steps=0 to only read there; if "
            f"no other job saves there, start with take_over_dir=True, or remove {file}",
        )
