"""The schedule of one tier: its plan, the cost of its saves, and its one background thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from emergency_ckpt.background import SAVE_NICENESS, BackgroundWorker, Failures
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.config.policies import SavePlan
from emergency_ckpt.core.save.save_rules import is_due
from emergency_ckpt.core.save.step_agreement import Progress
from emergency_ckpt.core.save.timing import Backoff, TierStatus
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.save.step_agreement import Choice, SaveAgreement
from emergency_ckpt.types import TierName

_MOST_STEPS_ASKED = 1000
_HORIZON_S = 0.1


class TierSchedule:
    """Decides for one tier. The training thread uses all but what is marked below."""

    def __init__(self, name: TierName, plan: SavePlan, failures: Failures) -> None:
        self.name: TierName = name
        self.plan = plan
        self._failures = failures
        self.worker = BackgroundWorker(f"eckpt-{name}-saves", failures, SAVE_NICENESS)
        self._lock = threading.Lock()
        self._last: int | None = None
        self._last_started: int | None = None
        self._agreed_step: int | None = None
        self._last_start_s = self._began_s = time.monotonic()
        self._interval_s = 0.0
        self._stall_s = 0.0
        self._slowest_stall_s = 0.0
        self._save_s = 0.0
        self._asked_up_to = -1
        self._stride = 1
        self._request: int | None = (
            None  # a step that a user's policy wants, and nobody has agreed on
        )
        self._backoff = Backoff()
        self._failed_in_row = 0
        self._failed_at_s = 0.0
        self._waited_in_vain = False

    @property
    def last(self) -> int | None:
        """The last step at which a save was due, or that was restored; None before the first."""
        return self._last

    @property
    def last_started(self) -> int | None:
        """The step of the newest save that went to the background; None before the first."""
        return self._last_started

    @property
    def pace(self) -> tuple[float, float]:
        """Return the seconds since the newest save began, and between the last two due ones."""
        return time.monotonic() - self._began_s, self._interval_s

    @property
    def stall_s(self) -> float:
        """Return the seconds that the newest save held up the training thread of this process."""
        return self._stall_s

    def restart_from(self, step: int | None) -> None:
        """After a restore of ``step`` (None: of nothing): what came later is forgotten."""
        with self._lock:
            self._last = step
            self._agreed_step = None
            self._last_start_s = time.monotonic()
            self._asked_up_to = -1 if step is None else step
            self._request = None
        if step is not None:
            self._tell_policies(step)

    def forget(self, step: int) -> None:
        """After a removal of ``step``: it may be saved again."""
        with self._lock:
            if self._last == step:
                self._last = step - 1 if step else None

    def is_behind(self, step: int) -> bool:
        """Return whether ``step`` comes after the last one."""
        return self._last is None or step > self._last

    def is_due(self, step: int, *, preempted: bool = False) -> bool:
        """Return whether a save is due without agreement. Raises what policies raise."""
        if is_due(self.plan.rules, step, self._last):
            return True
        return self.is_behind(step) and any(
            # Not whether a save is under way, nor the clock's last digits: all must answer alike.
            policy.wants(step, time.time(), busy=False, preempted=preempted)
            for policy in self.plan.everywhere
        )

    def note_due(self, step: int) -> None:
        """A save is due at ``step``, whatever becomes of it."""
        with self._lock:
            self._last, before_s = step, self._last_start_s
            self._last_start_s = time.monotonic()
            self._interval_s = self._last_start_s - before_s
        self._tell_policies(step)

    def _tell_policies(self, step: int) -> None:
        for policy in (*self.plan.asked, *self.plan.everywhere):
            policy.saved(step, time.time())

    def note_started(self, step: int, stall_s: float) -> None:
        """The save at ``step`` is in the background now; it cost the training thread so much."""
        with self._lock:
            self._last_started = step
            self._stall_s = stall_s
            if self._agreed_step is not None and self._agreed_step <= step:
                self._agreed_step = None

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the background; RuntimeError when the save before is under way."""

        self._began_s = started_s = time.monotonic()

        def timed() -> None:
            work()
            self._save_s = time.monotonic() - started_s

        self.worker.submit(timed)

    def wait_idle(self, limit_s: float, *, each_time: bool) -> bool:
        """Return whether the save before has ended; waits for that at most so long.

        Unless ``each_time``, only once for each save: a step must not pay for what an earlier one
        has waited for in vain.
        """
        waits = each_time or not self._waited_in_vain
        idle = self.worker.wait_idle(limit_s if waits else 0)
        self._waited_in_vain = not idle
        return idle

    # After failures; for any thread.

    def note_outcome(self, *, failed: bool) -> None:
        """A save has ended, which lengthens the pause before the next one, or ends it."""
        with self._lock:
            self._failed_in_row = self._failed_in_row + 1 if failed else 0
            self._failed_at_s = time.monotonic()

    @property
    def pauses(self) -> bool:
        """Return whether no save should start yet, after those that have failed."""
        with self._lock:
            since_s = time.monotonic() - self._failed_at_s
            return since_s < self._backoff.pause_s(self._failed_in_row)

    # For the agreement's thread; all but ``is_ready`` at the leader.

    def is_ready(self, timeout_s: float) -> bool:
        """Return whether the save before is complete; waits for that at most so long."""
        return self.worker.wait_idle(timeout_s)

    def agreed(self, step: int, stall_s: float) -> None:
        """``step`` was agreed; the slowest process's stall so far."""
        with self._lock:
            self._slowest_stall_s = stall_s
            self._agreed_step = max(step, self._agreed_step or step)
            self._request = None

    def choose_step(self, progress: Progress, first_step: int, lead_s: float) -> Choice | None:
        """Return the step to propose now, not before ``first_step``; None for none."""
        if self.pauses:
            return None
        with self._lock:
            last, last_start_s, agreed = self._last, self._last_start_s, self._agreed_step
        # A save that is agreed has begun, for all who ask.
        ahead = agreed is not None and progress.step <= agreed
        starts_s = progress.arrived_s + (first_step - progress.step) * progress.step_time_s
        status = TierStatus(
            busy=ahead or not self.worker.wait_idle(0),
            has_saved=last is not None,
            since_last_s=max(starts_s, time.monotonic()) - last_start_s,
            stall_s=max(self._stall_s, self._slowest_stall_s),
            save_s=self._save_s,
            step_time_s=progress.step_time_s,
        )
        if any(rule.due(status) for rule in self.plan.timing):
            return Choice(first_step, waits=False)
        return self._ask(progress, first_step, lead_s, busy=status.busy)

    def choose_first(self, progress: Progress, first_step: int, lead_s: float) -> Choice | None:
        """Return the same, before two steps were made, which give the time of one."""
        return None if self.pauses else self._ask(progress, first_step, lead_s, busy=False)

    def _ask(
        self, progress: Progress, first_step: int, lead_s: float, *, busy: bool
    ) -> Choice | None:
        """Ask the user's policies about each step that comes into sight, once, in rising order.

        A wanted step that comes too soon to be agreed on, or was refused, is made good at the
        first step that all can agree on.
        """
        if not self.plan.asked:
            return None
        if self._stride != progress.stride:
            # Other steps will come than those that were asked about.
            self._asked_up_to = min(self._asked_up_to, progress.recent[-2])
            self._stride = progress.stride
        if self._request is None:
            self._request = self._next_wanted(progress, first_step, lead_s, busy=busy)
        if self._request is None:
            return None
        if self._request < first_step:
            return Choice(first_step, waits=True)
        return Choice(self._request, waits=True, exact=True)

    def _next_wanted(
        self, progress: Progress, first_step: int, lead_s: float, *, busy: bool
    ) -> int | None:
        horizon = math.ceil((lead_s + _HORIZON_S) / max(progress.step_time_s, 1e-6))
        up_to = first_step + min(horizon, _MOST_STEPS_ASKED * progress.stride)
        coming = range(progress.step + progress.stride, up_to + 1, progress.stride)
        for step in (*progress.recent, *coming):
            if step <= self._asked_up_to:
                continue
            self._asked_up_to = step
            for policy in self.plan.asked:
                try:
                    wanted = policy.wants(step, time.time(), busy=busy)
                except Exception as error:  # noqa: BLE001 - the user's code; the job goes on
                    failure = SaveFailed("ask", f"the save policy about step {step}", str(error))
                    failure.__cause__ = error
                    self._failures.record(failure)
                    continue
                if wanted:
                    return step
        return None


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
        self._agreements = 0
        self._inspected: int | None = None
        self._found: dict[TierName, int | None] = {}
        self._agreement = self._new_agreement()

    def _new_agreement(self) -> SaveAgreement | None:
        agreed: dict[TierName, TierSchedule] = {
            name: s for name, s in self._schedules.items() if s.plan.is_agreed
        }
        number, self._agreements = self._agreements, self._agreements + 1
        if not agreed:
            return None
        return SaveAgreement(
            self._coordinator,
            f"agree/{number}",
            agreed,
            self._failures,
            timeout_s=self._timeout_s,
        )

    def inspect(self, step: int, *, preempted: bool) -> bool:
        """Return whether a save is due at ``step``; ``take`` then says the same."""
        if self._inspected != step:
            self._found = self._find(step, preempted=preempted)
            self._inspected = step
        return bool(self._found)

    def take(self, step: int, *, force: bool, preempted: bool) -> dict[TierName, int | None]:
        """Return the tiers in which a save is due, each with its proposal while that is undecided.

        ``force``: in all tiers that have not gone on behind ``step``.
        """
        self.inspect(step, preempted=preempted)
        due, self._inspected = self._found, None
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
        self._inspected = None
