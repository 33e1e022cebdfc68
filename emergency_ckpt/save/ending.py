"""The end of a process's saves: at a normal end, after an exception, and after a notice.

1. A normal end acts on a notice that has come since the last step (``end_training``), writes RAM's
   newest step to storage (``store_newest``), waits, ends all threads (``stop``), and warns of a
   last step that storage lacks (``warn_of_unstored``).
2. After an exception the saves in progress get a short time to end (``abandon``).
3. When the loop does not act on a notice in time, a thread writes RAM's newest step to storage
   (``OverdueNotice``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from emergency_ckpt.cluster.round import leave_together
from emergency_ckpt.core.save.last_step import unstored_text
from emergency_ckpt.errors import CheckpointError, DeadlineExceeded
from emergency_ckpt.save.last_step import LastStep
from emergency_ckpt.save.overdue_notice import OverdueNotice
from emergency_ckpt.save.save_work import SavedSteps, SaverParts, SaveWork
from emergency_ckpt.save.schedule import DueSaves, TierSchedule
from emergency_ckpt.storage.calls import release_workers
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, TierName

_STOP_TIMEOUT_S = 30.0
_END_S = 30.0
"""Longest wait for the leader to announce no more steps: all processes of a job end together."""


class Ending:
    """Ends a process's saves. For the training thread.

    Args:
      entry: a lock that ``save`` holds, so that no other thread begins a save meanwhile.

    Attributes:
      last_step: of the last call of ``save`` since the start or a restore; None without a call.
      is_restoring: while True, no step is announced or brought to storage.
    """

    def __init__(
        self,
        parts: SaverParts,
        schedules: Mapping[TierName, TierSchedule],
        saved: SavedSteps,
        work: SaveWork,
        due: DueSaves,
        entry: threading.Lock,
    ) -> None:
        self._parts = parts
        self._schedules = schedules
        self._saved = saved
        self._work = work
        self._due = due
        self._entry = entry
        self.last_step: int | None = None
        self.is_restoring = False
        self._left = self._heard_at_end = False
        self._newest: LastStep | None = None
        if parts.persistent is not None and PERSISTENT in schedules:
            self._newest = LastStep(parts, parts.persistent, schedules[PERSISTENT], saved)
        self._overdue = OverdueNotice(
            parts.watch,
            parts.config.preemption_grace_s,
            self._bring_newest,
            self._tell_missed,
            self._newest_steps,
            has_storage=self._newest is not None,
        )

    def begin_restore(self) -> None:
        """Announce no more steps, before a restore; wait for the saves in progress."""
        with self._entry:
            self.is_restoring = True
        self._due.stop(_END_S)
        for schedule in self._schedules.values():  # of a save that began in another thread
            schedule.worker.wait_idle(self._parts.config.longest_wait_s)
        self.last_step = None

    def end_restore(self) -> None:
        """Announce steps again, after a restore that succeeded or failed."""
        self.is_restoring = False
        self._due.start_again()

    # Waiting and ending.

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """As ``EmergencyCheckpointer.wait_until_finished``."""
        sync_step, deadline_s = self._parts.watch.sync_step, self._deadline_s(timeout_s)
        for name, schedule in self._schedules.items():
            if not schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic())):
                if sync_step is not None:
                    self.say_not_written(name, sync_step, "the time is over")
                raise DeadlineExceeded(
                    "wait for", f"the save to the {name} tier", "it has not ended in time"
                )
        preservation = self._parts.preservation
        left_s = max(0.0, deadline_s - time.monotonic())
        if preservation is not None and not preservation.wait_idle(left_s):
            raise DeadlineExceeded("wait for", "the removal of old steps", "not done in time")
        if sync_step is not None and not self._left:
            self._left = True
            leave_together(self._parts.coordinator, max(1.0, self._parts.watch.grace_left_s()))

    def _deadline_s(self, timeout_s: float | None) -> float:
        """Return the end of ``timeout_s`` (None: of the longest wait), or of a grace period."""
        config, watch = self._parts.config, self._parts.watch
        limit_s = config.longest_wait_s if timeout_s is None else timeout_s
        if watch.sync_step is not None:
            limit_s = min(limit_s, watch.grace_left_s())
        return time.monotonic() + limit_s

    def end_training(self, timeout_s: float | None = None) -> None:
        """Announce no more steps, and act on a notice that has come since the last step."""
        self._due.stop(min(_END_S, self._deadline_s(timeout_s) - time.monotonic()))
        watch = self._parts.watch
        self._heard_at_end = watch.reached_at_end()
        if self._heard_at_end:
            left_s = watch.grace_left_s()
            self._parts.events.emit("preemption.reached", step=watch.sync_step, grace_s=left_s)

    def store_newest(
        self, timeout_s: float | None, settle: Callable[[SaveId], None], *, goes_on: bool
    ) -> None:
        """At a normal end, begin to bring RAM's newest step to storage, where storage lacks it.

        Each process that ends well calls this method once. It blocks for saves in progress and for
        the leader. A run that has only read changes nothing.

        Args:
          settle: decides which steps count beside a save to storage.
          goes_on: False where nothing was saved since a step was restored by its number.
        """
        self._overdue.close()
        newest = self._newest
        if newest is None or self.last_step is None:
            return
        if not goes_on:
            newest.reason = "nothing was saved since an older step was restored by its number"
            return
        deadline_s = self._deadline_s(timeout_s)
        is_idle = all(
            schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic()))
            for schedule in self._schedules.values()
        )
        placement = self._work.placement if is_idle else None
        decision = newest.agree(placement, deadline_s, self._parts.inspect)
        if decision is not None and decision.stored is not None and placement is not None:
            settle(decision.stored)
            newest.begin(decision, placement)

    def warn_of_unstored(self) -> None:
        """After a normal end, warn if storage lacks the last step: RAM is lost with its hosts."""
        persistent, newest = self._parts.persistent, self._newest
        if persistent is None or newest is None or self._parts.process[0] != 0:
            return
        in_ram = max(self._saved.of(LOCAL), default=None)
        text = unstored_text(self.last_step, persistent.newest_listed(), in_ram, newest.reason)
        if text:
            self._parts.events.emit("stop.not_saved", step=self.last_step, text=text)

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for the saves under way, at most for a notice's grace period; end all threads."""
        try:
            self.wait_until_finished(timeout_s)
            step = self._parts.watch.sync_step
            if self._heard_at_end and step is not None:
                why = f"the newest that is saved is {self._saved.newest()}"
                for name in self._schedules:
                    if step not in self._saved.of(name):
                        self.say_not_written(name, step, why)
        finally:
            self.end_threads(_STOP_TIMEOUT_S)

    def abandon(self, timeout_s: float) -> None:
        """Wait so long for saves in progress, then end all threads that end soon; never raise."""
        self._overdue.close(is_bad_end=True)
        deadline_s = time.monotonic() + timeout_s
        try:
            self.wait_until_finished(timeout_s)
        except CheckpointError as error:
            logging.error("saves in progress are cancelled: %s", error)
        self.end_threads(max(1.0, (deadline_s - time.monotonic()) / 3))

    def end_threads(self, timeout_s: float) -> None:
        """End each thread after its present work, if that takes no longer than ``timeout_s``."""
        self._overdue.close()
        self._due.stop()
        if self._parts.persistent is not None:
            self._parts.persistent.end_waits()
        ended = [schedule.worker.stop(timeout_s) for schedule in self._schedules.values()]
        if self._parts.preservation is not None:
            ended.append(self._parts.preservation.stop(timeout_s))
        self._work.close()
        if not all(ended):
            # Storage may not answer for hours, and the interpreter's end would wait for its calls.
            release_workers()

    def say_not_written(self, name: TierName, step: int, why: str) -> None:
        """Report that a tier does not have the step of a notice."""
        self._parts.events.emit("preemption.missed", cause="not_written", step=step, tier=name)
        logging.error("preempted: step %d is not in the %s tier, %s", step, name, why)

    # A notice on which the loop does not act in time; in the thread of ``OverdueNotice``.

    def _bring_newest(self, deadline_s: float) -> None:
        """Begin, with the other processes, to bring RAM's newest step to storage.

        Nothing begins while ``save`` runs.
        """
        newest, placement, watch = self._newest, self._work.placement, self._parts.watch
        if newest is None or placement is None or not self._parts.config.save_on_preemption:
            return

        def inspect() -> None:
            if self._overdue.is_closing or self.is_restoring or watch.sync_step is not None:
                raise CheckpointError("wait for", "the decision of process 0", "the loop goes on")

        decision = newest.agree(placement, deadline_s, inspect, goes_on=True)
        if decision is None or not self._entry.acquire(blocking=False):
            return
        try:
            is_idle = all(schedule.worker.wait_idle(0) for schedule in self._schedules.values())
            if is_idle and not self.is_restoring and watch.sync_step is None:
                newest.begin(decision, placement)
        finally:
            self._entry.release()

    def _newest_steps(self) -> tuple[int | None, int | None]:
        """Return the newest steps in RAM and in storage, as far as this process knows."""
        stored = list(self._saved.of(PERSISTENT))
        listed = None if self._newest is None else self._newest.listed()
        stored += [] if listed is None else [listed]
        return max(self._saved.of(LOCAL), default=None), max(stored, default=None)

    def _tell_missed(self, text: str) -> None:
        logging.error("%s", text)
        # An observer of this event may end the process.
        self._parts.events.emit("preemption.missed", cause="no_save", text=text)
