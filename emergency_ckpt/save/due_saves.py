"""In which tiers a save is due at a step: by the step, or as the processes have agreed."""

from __future__ import annotations

from collections.abc import Mapping

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.save.step_agreement import AgreedTier, SaveAgreement
from emergency_ckpt.types import TierName


class DueSaves:
    """Asks schedules and agreement once for each step. For the training thread."""

    def __init__(
        self,
        schedules: Mapping[TierName, TierSchedule],
        coordinator: Coordinator,
        failures: Failures,
        *,
        timeout_s: float,
    ) -> None:
        self._schedules = schedules
        self._coordinator = coordinator
        self._failures = failures
        self._timeout_s = timeout_s
        self._lives = 0
        self._looked_at: int | None = None
        self._found: dict[TierName, int | None] = {}
        self._agreement = self._new_agreement()

    def _new_agreement(self) -> SaveAgreement | None:
        agreed: dict[TierName, AgreedTier] = {
            name: s for name, s in self._schedules.items() if s.plan.is_agreed
        }
        number, self._lives = self._lives, self._lives + 1
        if not agreed:
            return None
        return SaveAgreement(
            self._coordinator,
            f"agree/{number}",
            agreed,
            self._failures,
            timeout_s=self._timeout_s,
        )

    def look(self, step: int, *, preempted: bool) -> bool:
        """Return whether a save is due at ``step``; ``take`` then says the same."""
        if self._looked_at != step:
            self._found = self._find(step, preempted=preempted)
            self._looked_at = step
        return bool(self._found)

    def take(self, step: int, *, force: bool, preempted: bool) -> dict[TierName, int | None]:
        """Return the tiers in which a save is due, each with its proposal while that is undecided.

        ``force``: in all tiers that have not gone on behind ``step``.
        """
        self.look(step, preempted=preempted)
        due, self._looked_at = self._found, None
        for name, schedule in self._schedules.items():
            if force and (schedule.is_behind(step) or step == schedule.last):
                due.setdefault(name, None)
        return {name: due[name] for name in self._schedules if name in due}

    def _find(self, step: int, *, preempted: bool) -> dict[TierName, int | None]:
        due: dict[TierName, int | None] = {}
        if self._agreement is not None:
            for agreed in self._agreement.arrive(step):
                due[agreed.tier] = None if agreed.confirmed else agreed.number
        for name, schedule in self._schedules.items():
            if schedule.is_due(step, preempted=preempted):
                due[name] = None
        return due

    def decision_on(self, number: int) -> bool | None:
        """Return the leader's decision on a proposal. Waits, in the background; None: none came."""
        assert self._agreement is not None, "only an agreement makes proposals"
        return self._agreement.decision_on(number, self._timeout_s)

    def expect(self, step: int) -> None:
        """The step after ``step`` is the next, after a restore. On all processes; never waits."""
        if self._agreement is not None:
            self._agreement.expect(step)

    def stop(self) -> None:
        """Agree on nothing more."""
        if self._agreement is not None:
            self._agreement.stop()

    def start_again(self) -> None:
        """Agree anew, after a restore. Collective, as ``stop`` before it."""
        self._agreement = self._new_agreement()
        self._looked_at = None
