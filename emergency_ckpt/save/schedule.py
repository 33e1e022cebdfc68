"""The schedule of one tier: its plan, the cost of its saves, and its one background thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from emergency_ckpt.background import (
    SAVE_NICENESS,
    BackgroundWorker,
    Failures,
    off_training_thread,
)
from emergency_ckpt.config.policies import SavePlan
from emergency_ckpt.core.save.announcements import Progress
from emergency_ckpt.core.save.save_rules import is_due
from emergency_ckpt.core.save.timing import TierStatus, backoff_s
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.types import TierName

_MOST_STEPS_ASKED = 1000
_HORIZON_S = 0.1
_RULE_RESTS_S = 1.0
"""Pause after an error of a rule by the clock: it is asked far more often than each step."""


class Choice(NamedTuple):
    """A step to announce; ``exact`` as in ``Announcement``."""

    step: int
    exact: bool = False


class TierSchedule:
    """Decides when one tier saves. For the training thread, but for what is marked below.

    Attributes:
      last: the last step at which a save was due, or that was restored; None before the first.
      last_started: the step of the newest save that went to the background; None before the first.
      stall_s: the seconds that the newest save held up the training thread of this process.
      waited_in_vain: the newest wait ended before the save under way did.
    """

    def __init__(self, name: TierName, plan: SavePlan, failures: Failures) -> None:
        self.name: TierName = name
        self.plan = plan
        self._failures = failures
        self.worker = BackgroundWorker(f"eckpt-{name}-saves", failures, SAVE_NICENESS)
        self._lock = threading.Lock()
        self.last: int | None = None
        self.last_started: int | None = None
        self._announced_step: int | None = None
        self._announces_again = False
        self._last_start_s = self._began_s = time.monotonic()
        self._interval_s = 0.0
        self.stall_s = 0.0
        self._slowest_stall_s = 0.0
        self._save_s = 0.0
        self._asked_up_to = -1
        self._stride = 1
        self._rules_rest_until_s = [-math.inf] * len(plan.timing)
        # A step that a user's policy wants, and that is not announced.
        self._request: int | None = None
        self._made_good = -1
        self._begun = self._reported = -1
        self._ended_s: float | None = None
        self._after_save: Callable[[int], None] | None = None
        self._failed_in_row = 0
        self._failed_at_s = 0.0
        self.waited_in_vain = False

    @property
    def pace(self) -> tuple[float, float]:
        """Return the seconds since the newest save began, and between the last two due saves."""
        return time.monotonic() - self._began_s, self._interval_s

    def restart_from(self, step: int) -> None:
        """Forget, after a restore of ``step``, all that came later."""
        with self._lock:
            self.last = step
            self.last_started = None
            self._announced_step = None
            self._announces_again = False
            self._last_start_s = time.monotonic()
            self._asked_up_to = step
            self._request, self._made_good = None, -1
        self._tell_policies(step)

    def forget(self, step: int) -> None:
        """Allow another save of ``step``, which was removed."""
        with self._lock:
            if self.last == step:
                self.last = step - 1 if step else None
            if self.last_started == step:
                self.last_started = None

    def is_behind(self, step: int) -> bool:
        """Return whether ``step`` comes after the last due or restored step."""
        return self.last is None or step > self.last

    def is_due(self, step: int, *, preempted: bool = False) -> bool:
        """Return whether a save is due unannounced. Raises what policies raise."""
        if is_due(self.plan.rules, step, self.last):
            return True
        return self.is_behind(step) and any(
            # All processes must get the same answer: so it must not depend on a save under way,
            # nor on the last digits of the clock.
            policy.wants(step, time.time(), busy=False, preempted=preempted)
            for policy in self.plan.everywhere
        )

    def note_due(self, step: int) -> None:
        """Note that a save is due at ``step``, whatever its outcome. From any thread."""
        with self._lock:
            self.last = step if self.last is None else max(step, self.last)
            before_s, self._last_start_s = self._last_start_s, time.monotonic()
            self._announces_again = False
            self._interval_s = self._last_start_s - before_s
        self._tell_policies(step)

    def _tell_policies(self, step: int) -> None:
        for policy in (*self.plan.asked, *self.plan.everywhere):
            policy.saved(step, time.time())

    def note_started(self, step: int, stall_s: float) -> None:
        """Note that the save of ``step`` is in the background now, after so long a stall."""
        with self._lock:
            self.last_started = step
            self.stall_s = stall_s
            if self._announced_step is not None and self._announced_step <= step:
                self._announced_step = None

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the background; RuntimeError when the previous save is under way."""
        self._began_s = started_s = time.monotonic()

        def timed() -> None:
            try:
                work()
            finally:
                self._ended_s = time.monotonic()
                self._save_s = self._ended_s - started_s
                self._report()

        self._ended_s, self._begun = None, self.last or 0
        self.worker.submit(timed)

    def _report(self) -> None:
        """Report that all saves begun so far have ended. In the background thread."""
        self._reported = begun = self._begun
        if self._after_save is not None:
            self._after_save(begun)

    def leave_out(self, step: int, tell: Callable[[], None]) -> None:
        """Leave the save of ``step`` out here: it ends with the save under way.

        ``tell``: tells the others, which wait for this process. The background thread calls it
        before that thread is idle again.
        """

        def tell_and_report() -> None:
            try:
                tell()
            finally:
                if self._reported < step:  # the report on the save under way was made before
                    self._report()

        self._begun = step
        self.worker.submit_after(tell_and_report)

    def wait_idle(self, limit_s: float) -> bool:
        """Wait at most so long for the end of the previous save; return whether it has ended."""
        idle = self.worker.wait_idle(limit_s)
        self.waited_in_vain = not idle
        return idle

    # After failures; for any thread.

    def note_outcome(self, *, failed: bool) -> None:
        """Note the end of a save: a failure lengthens the pause before the next save.

        A success ends the pause.
        """
        with self._lock:
            self._failed_in_row = self._failed_in_row + 1 if failed else 0
            self._failed_at_s = time.monotonic()

    @property
    def pauses(self) -> bool:
        """Return whether no save should start yet, since earlier saves have failed."""
        with self._lock:
            since_s = time.monotonic() - self._failed_at_s
            return since_s < backoff_s(self._failed_in_row)

    # For the thread of the announcements, at the leader.

    @property
    def begun(self) -> tuple[int, float | None]:
        """The newest step of which a save began here, and when that save ended.

        The step is -1 for no save since ``begin_reports``; the time is None for a save under way.
        """
        return self._begun, self._ended_s

    def begin_reports(self, after_save: Callable[[int], None]) -> None:
        """Call ``after_save`` in the background at the end of each save. No save is under way.

        ``after_save`` gets the step up to which all saves have ended or were left out.
        """
        self._after_save, self._begun, self._reported = after_save, -1, -1

    def announced(self, step: int) -> None:
        with self._lock:
            self._announced_step = max(step, self._announced_step or step)
            self._announces_again = False
            self._request = None

    def announce_again(self, step: int) -> None:
        """Announce the save of ``step`` once more, for which a process was late.

        Not when a later step has been due since.
        """
        with self._lock:
            self._announces_again = self._announces_again or step == self.last

    def note_stall(self, stall_s: float) -> None:
        """Note the stall of the slowest process's training thread at the newest save."""
        with self._lock:
            self._slowest_stall_s = stall_s

    def choose_step(
        self, progress: Progress, first_step: int, lead_s: float, *, others_save: bool
    ) -> Choice | None:
        """Return the step to announce now, not before ``first_step``; None for none.

        ``others_save``: other processes have not ended the save that this process has ended.
        """
        if self.pauses:
            return None
        with self._lock:
            last, last_start_s = self.last, self._last_start_s
            announced, again = self._announced_step, self._announces_again
        # An announced save counts as begun, for rules and policies.
        ahead = announced is not None and progress.step <= announced
        starts_s = progress.arrived_s + (first_step - progress.step) * progress.step_time_s
        status = TierStatus(
            busy=ahead or others_save or not self.worker.wait_idle(0),
            has_saved=last is not None,
            since_last_s=max(starts_s, time.monotonic()) - last_start_s,
            stall_s=max(self.stall_s, self._slowest_stall_s),
            save_s=self._save_s,
            step_time_s=progress.step_time_s,
        )
        # A rule need not look at ``busy``. While a step is ahead, such a rule would be asked again
        # at once, and announce a step each time: no turn would come to the other tier.
        if (again and not status.busy) or (not ahead and self._is_due_by_clock(status)):
            return Choice(first_step)
        return self._ask(progress, first_step, lead_s, busy=status.busy)

    def _is_due_by_clock(self, status: TierStatus) -> bool:
        """Return whether one of the rules by the clock asks for a save.

        An error of one rule is recorded, and stops no other rule and no other tier.
        """
        for number, rule in enumerate(self.plan.timing):
            if time.monotonic() < self._rules_rest_until_s[number]:
                continue
            try:
                if off_training_thread(partial(rule.due, status)):
                    return True
            except Exception as error:  # noqa: BLE001 - the user's code; the job goes on
                text = f"{type(error).__name__}: {error}"
                failure = SaveFailed("ask", f"the save rule {type(rule).__name__}", text)
                self._failures.record(failure, cause=error)
                self._rules_rest_until_s[number] = time.monotonic() + _RULE_RESTS_S
        return False

    def choose_first(
        self, progress: Progress, first_step: int, lead_s: float, *, others_save: bool
    ) -> Choice | None:
        """Return the step to announce, as ``choose_step``, while no step's time is known.

        That takes two steps. Only the user's policies are asked until then.
        """
        return None if self.pauses else self._ask(progress, first_step, lead_s, busy=others_save)

    def _ask(
        self, progress: Progress, first_step: int, lead_s: float, *, busy: bool
    ) -> Choice | None:
        """Ask the user's policies once about each step that comes soon, in rising order.

        A wanted step that comes too soon to be announced is replaced by the first step that is far
        enough ahead.
        """
        if not self.plan.asked:
            return None
        if self._stride != progress.stride:
            # The coming steps are not those that the policies were asked about.
            self._asked_up_to = min(self._asked_up_to, progress.recent[-2])
            self._stride = progress.stride
        if self._request is None:
            self._request = self._next_wanted(progress, first_step, lead_s, busy=busy)
        if self._request is None:
            return None
        if self._request < first_step:
            self._made_good = first_step
            return Choice(first_step)
        return Choice(self._request, exact=True)

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
                    is_wanted = off_training_thread(
                        partial(policy.wants, step, time.time(), busy=busy)
                    )
                except Exception as error:  # noqa: BLE001 - the user's code; the job goes on
                    failure = SaveFailed("ask", f"the save policy about step {step}", str(error))
                    self._failures.record(failure, cause=error)
                    continue
                if is_wanted and step > self._made_good:
                    return step
        return None
