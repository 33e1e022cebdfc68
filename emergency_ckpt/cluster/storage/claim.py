"""This run's claim on its persistent directory: without it nothing is saved or removed there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from absl import logging

from emergency_ckpt.core.run_claim import Claim, RunRecord, decide_claim
from emergency_ckpt.errors import DirectoryInUse, PersistentTierError
from emergency_ckpt.tiers.persistent.run_record import Found, RunFile
from emergency_ckpt.tiers.persistent.tier import PersistentTier

_ATTEMPTS = 8
_NO_LIFE = ""
"""Sorts before every life."""


class DirectoryClaim:
    """Writes this run's name into the directory and checks that it stays. Thread-safe; blocks.

    All methods raise PersistentTierError, which is DirectoryInUse when another run saves there, or
    a newer job of this one.

    Args:
      mine: the record of this job.
      known: lives that the leader found there at the start, and that are over.
      take_over: replace another run's name, once.
    """

    def __init__(
        self,
        tier: PersistentTier,
        mine: RunRecord,
        known: Callable[[], Collection[str]] = tuple,
        *,
        take_over: bool = False,
    ) -> None:
        self._tier = tier
        self._mine = mine
        self._known = known
        self._lock = threading.Lock()
        self._may_take_over = take_over
        self._held = False

    def find(self, deadline_s: float) -> str:
        """Return the recorded life of this run, or "". Writes nothing.

        DirectoryInUse when another run is recorded, unless ``take_over``.
        """
        there = self._record_of(RunFile(self._tier.storage).read(deadline_s), deadline_s)
        if there is None:
            return ""
        if not there.is_same_run(self._mine):
            self._decide(there, ())
            return ""
        return there.life

    def hold(self, tier: PersistentTier | None = None, deadline_s: float | None = None) -> None:
        """Return when the directory names this job. ``tier``: the same with other deadlines."""
        file = RunFile((tier or self._tier).storage)
        known = self._known()
        for _ in range(_ATTEMPTS):
            found = file.read(deadline_s)
            if self._decide(self._record_of(found, deadline_s), known) == "hold":
                self._note_held()
                _tidy(file, found)
                return
            file.replace(found, self._mine, deadline_s)
        raise self._refusal("other jobs write their names there at the same time")

    def renew(self) -> None:
        """Check the claim before a removal: as ``hold``, without writing while it is held."""
        with self._lock:
            held = self._held
        if held:
            self.hold()
        else:
            self._decide(self._record_of(RunFile(self._tier.storage).read()), self._known())

    def _record_of(self, found: Found, deadline_s: float | None = None) -> RunRecord | None:
        """Return the record; if it is damaged, the run of the newest step there.

        So the run that saves there can restart despite damage, and no other run can begin.
        """
        if found.damage is None:
            return found.record
        logging.warning("the record of the run that saves there is damaged: %s", found.damage)
        steps = self._tier.whole_steps(deadline_s)
        if not steps:
            return None
        return RunRecord(self._tier.marker(max(steps), deadline_s).save.run_id, False, _NO_LIFE)

    def _decide(self, there: RunRecord | None, known: Collection[str]) -> Claim:
        """Return the decision; DirectoryInUse when this job is refused."""
        with self._lock:
            held, may_take_over = self._held, self._may_take_over
        held = held and (there is None or there.life != _NO_LIFE)
        what, reason = decide_claim(there, self._mine, known, held=held)
        if what != "refuse":
            return what
        if not may_take_over:
            raise self._refusal(reason)
        logging.warning("taking over %s: %s", self._tier.directory, reason)
        return "write"

    def _note_held(self) -> None:
        with self._lock:
            self._held = True
            self._may_take_over = False

    def _refusal(self, reason: str) -> DirectoryInUse:
        return DirectoryInUse(
            "save in",
            self._tier.directory,
            reason,
            hint="give this job its own dir, or set save_every_n_steps=0 to only read there; if "
            "no other job saves there, start with take_over_dir=True, or remove "
            f"{RunFile(self._tier.storage).target}",
        )


def _tidy(file: RunFile, found: Found) -> None:
    try:
        file.remove_older(found)
    except PersistentTierError as error:
        # Older records are ignored, and the next claim tries again.
        logging.warning("an older record of a run could not be removed: %s", error)
