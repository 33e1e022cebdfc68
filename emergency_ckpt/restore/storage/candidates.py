"""The steps of storage that a restore may take: the newest first, older ones when these fail."""

from __future__ import annotations

import time

from absl import logging

from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.events import EventSink
from emergency_ckpt.tiers.persistent.tier import PersistentTier

_NAMED_STEPS = 16


class StoredCandidates:
    """The steps that the leader of one restore has found in storage. Blocks for storage.

    Attributes:
      offered: all steps that were offered so far, oldest first; None before ``ask``.
    """

    def __init__(self, tier: PersistentTier, events: EventSink, requested_step: int | None) -> None:
        self._tier = tier
        self._events = events
        self._requested_step = requested_step
        self._oldest = 0
        self.offered: tuple[PersistentStep, ...] = ()

    def ask(self, deadline_s: float) -> None:
        """Learn the newest steps, and the one that was asked for. PersistentTierError."""
        steps = self._tier.steps(deadline_s, wanted=self._requested_step)
        self._take(steps)
        passed = self._tier.found.passed_over
        if passed:
            self._events.emit(
                "persistent.passed_over", count=len(passed), steps=list(passed[:_NAMED_STEPS])
            )

    def ask_older(self, answer: RestorePlan | NoPlan, deadline_s: float) -> bool:
        """Learn older steps where ``answer`` needs them; return whether there are any.

        It does when no step that was offered can be restored: then what is left in RAM may be older
        than what is next in storage. PersistentTierError.
        """
        if self._requested_step is not None or self._oldest == 0:
            return False
        if isinstance(answer, RestorePlan):
            if answer.step >= self._oldest:
                return False
        elif answer.kind not in ("nothing", "unrecoverable"):
            return False
        left_s = deadline_s - time.monotonic()
        steps = self._tier.steps(time.monotonic() + left_s / 2, below=self._oldest)
        self._take(steps)
        return bool(steps)

    def ask_again(self, deadline_s: float) -> bool:
        """Learn the newest steps once more; return whether there are others than before.

        For a restore that has lost a step: the job that saves there may have removed it, because it
        has saved a newer one. PersistentTierError.
        """
        if self._requested_step is not None:
            return False
        left_s, known, oldest = deadline_s - time.monotonic(), set(self.offered), self._oldest
        self._take(self._tier.steps(time.monotonic() + left_s / 2))
        self._oldest = min(oldest, self._oldest) or oldest
        return not known.issuperset(self.offered)

    def _take(self, steps: list[PersistentStep]) -> None:
        """The oldest of those that seem whole: below it nobody has looked yet."""
        self._oldest = min((each.step for each in steps if not each.problem), default=0)
        self.offered = tuple(sorted({*self.offered, *steps}))

    def timeline(self, deadline_s: float) -> Timeline | None:
        """Return the timeline on record in storage; None when none can be read there."""
        try:
            return self._tier.found.timeline(deadline_s)
        except CorruptData as error:
            # What it said of steps in storage has been done there. The next save writes it anew.
            logging.warning("%s", error)
            self._events.emit("restore.note", text=str(error)[:500])
            return None
