"""The larger half of a restore ahead of it, in a thread of its own, while the caller compiles."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from absl import logging

from emergency_ckpt.core.restore.plan_types import NoPlan
from emergency_ckpt.errors import CheckpointError, DeadlineExceeded
from emergency_ckpt.restore.execution import RestoreExecution
from emergency_ckpt.restore.protocol import AttemptCancelled, PlanFailed, no_plan_error
from emergency_ckpt.restore.request import MadeOf, RestoredState, RestoreParts, RestoreRequest

_CHECK_INTERVAL_S = 0.1
_GRACE_S = 5.0
"""Added to a deadline that another thread keeps, before it is given up."""


class Prefetch:
    """One restore in a thread of its own, and the cache that it leaves on this process's devices.

    Collective, as a restore is; what becomes of the cache is each process's own affair. The thread
    starts with the object. All methods may be called from any thread; none is collective.

    Args:
      number: the same everywhere.
      after: one that was given up; this one waits for its end.
      saves_ended: whether no save of this process is under way, waiting so many seconds for it.
      held: keeps persistent steps from being removed.

    Attributes:
      cancelled_for: why it is not wanted any more, or came to nothing; empty while it may be used.
    """

    def __init__(
        self,
        parts: RestoreParts,
        request: RestoreRequest,
        number: int,
        *,
        after: Prefetch | None,
        saves_ended: Callable[[float], bool],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._parts = parts
        self._after = after
        self._saves_ended = saves_ended
        self._held = held
        self._execution = RestoreExecution(parts, request, f"prefetch/{number}", self)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended_s = 0.0
        self._is_left_behind = False
        self._restored_state: RestoredState | None = None
        self.cancelled_for = ""
        self._started_s = time.monotonic()
        parts.events.emit("prefetch.started", requested_step=request.requested_step)
        threading.Thread(target=self._run, name="eckpt-prefetch", daemon=True).start()

    # The thread.

    def _run(self) -> None:
        try:
            self._bring()
        except Exception as error:  # noqa: BLE001 - the restore after it does without
            self._fail(error)
        finally:
            self._ended_s = time.monotonic()
            self._ended.set()

    def _bring(self) -> None:
        parts, after, self._after = self._parts, self._after, None
        if after is not None:
            self._wait_until(after.wait, "the prefetch before it")
        self._wait_until(self._saves_ended, "the save before it")
        with self._held():
            try:
                outcome = self._execution.run(self)
            finally:
                with self._lock:
                    if not self._is_left_behind:
                        # Also what was fetched: until a restore says what may go, all stays.
                        parts.tier.protect([held.save for held in parts.tier.held()[0]])
        if isinstance(outcome, RestoredState):
            with self._lock:
                if not self.cancelled_for:
                    self._restored_state = outcome
            parts.events.emit(
                "prefetch.finished",
                step=outcome.step,
                seconds=time.monotonic() - self._started_s,
            )
        elif isinstance(outcome, PlanFailed):
            raise self._execution.dialogue.failure(outcome)
        elif outcome.kind != "nothing":
            raise no_plan_error(outcome, f"run {parts.config.run_name!r}")
        else:
            self._find_nothing(outcome)

    def _wait_until(self, ended: Callable[[float], bool], what: str) -> None:
        # Given up, it still goes on to where it tells the others: they would wait for it.
        while not self.cancelled_for and not ended(_CHECK_INTERVAL_S):
            if time.monotonic() > self._execution.deadline_s:
                raise DeadlineExceeded("prefetch", "the state", f"{what} has not ended")

    def _find_nothing(self, outcome: NoPlan) -> None:
        for note in outcome.notes:
            self._parts.events.emit("restore.note", text=note)
        self.cancel("it found nothing")
        self._parts.events.emit("prefetch.nothing")

    def _fail(self, error: Exception) -> None:
        """Tell of the error, once: the restore after it meets the cause itself, if it lasts."""
        if isinstance(error, AttemptCancelled):
            self.cancel(error.problem)  # here nobody has asked for that yet
        if self.cancelled_for:
            self._parts.events.emit("prefetch.given_up", reason=self.cancelled_for[:500])
            return
        self.cancel(f"it failed: {error}"[:500])
        self._parts.events.emit("prefetch.failed", reason=str(error)[:500])
        is_typed = isinstance(error, CheckpointError)
        logging.warning(
            "prefetch failed: %s", error if is_typed else "".join(traceback.format_exception(error))
        )

    # As the attempt of its ``RestoreExecution``.

    def check(self) -> None:
        """AttemptCancelled when it was meanwhile: the others shall not wait for this one."""
        if self.cancelled_for:
            problem = f"it was given up: {self.cancelled_for}"
            raise AttemptCancelled("prefetch", "the state", problem)

    def apply_host_state(self, restored: RestoredState) -> None:
        """Host states are applied by ``restore`` alone."""

    def undo(self) -> None:
        """Nothing of the caller's was touched."""

    # As the cache.

    def find(self, wanted: MadeOf) -> RestoredState | None:
        """Return the state if it is made of ``wanted``; else release its memory, and None."""
        with self._lock:
            found = self._restored_state
        if found is None or found.made_of is None:
            return None
        difference = found.made_of.difference(wanted)
        if not difference:
            return found
        del found
        self.cancel(difference)
        return None

    def release(self, reason: str) -> None:
        """Release the memory of the state, if there is one."""
        if self._restored_state is not None:
            self.cancel(reason)

    # For the training thread.

    def cancel(self, reason: str) -> None:
        """It is not wanted any more: release what it holds, and end soon. Does not wait."""
        with self._lock:
            self.cancelled_for = self.cancelled_for or reason
            self._restored_state = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when the thread has ended, or at the latest a little after its deadline.

        True when it has, or was left behind.
        """
        if timeout_s is None:
            timeout_s = max(0.0, self._execution.deadline_s - time.monotonic()) + _GRACE_S
        return self._is_left_behind or self._ended.wait(timeout_s)

    def wait_for_state(self) -> bool:
        """Return whether it has brought a state, when its thread has ended or should have."""
        if not self.cancelled_for and not self.wait():
            self.cancel("it has not ended in time")
        if self.cancelled_for:
            self.give_way()
        return self._restored_state is not None

    def give_way(self) -> None:
        """Return when the thread, which was cancelled, has ended or changes RAM no more.

        It may wait for storage that does not answer. Blocks for a quarter of ``save_timeout_s`` at
        most, so that a save has its time.
        """
        if not self.wait(self._parts.config.save_timeout_s / 4):
            with self._lock:
                self._is_left_behind = True
            logging.warning("a prefetch that was given up still waits; it is left behind")

    def seconds_until(self, now_s: float) -> float:
        """Return the seconds that it had worked at ``now_s``."""
        end_s = min(self._ended_s, now_s) if self._ended.is_set() else now_s
        return max(0.0, end_s - self._started_s)


class Prefetches:
    """The prefetches of one checkpointer: at most one waits for its restore. One thread uses it."""

    def __init__(self, parts: RestoreParts) -> None:
        self._parts = parts
        self._count = 0
        self.current: Prefetch | None = None

    def start(
        self,
        request: RestoreRequest,
        saves_ended: Callable[[float], bool],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin one; see ``Prefetch``. CheckpointError when one waits for its restore already."""
        if self.current is not None and not self.current.cancelled_for:
            hint = "call restore first"
            raise CheckpointError("prefetch", "state", "there is one already", hint=hint)
        number, self._count = self._count, self._count + 1
        self.current = Prefetch(
            self._parts, request, number, after=self.current, saves_ended=saves_ended, held=held
        )

    def before_save(self, step: int) -> Callable[[], object] | None:
        """A save comes first: its background part is to call what this returns, if anything.

        The newest step is another one then, and two may not write at once.
        """
        if self.current is None:
            return None
        self.current.cancel(f"step {step} was saved before the restore")
        return self.current.give_way

    def before_removal(self, step: int) -> None:
        """Give up the prefetch, which may have ``step``, before that is removed. Waits for it."""
        if self.current is not None:
            self.current.cancel(f"step {step} was removed before the restore")
            self.current.give_way()

    def forget(self) -> None:
        """A restore is over, and with it the prefetch."""
        self.current = None

    def end(self, timeout_s: float) -> None:
        """Give up the one under way; its thread is left behind if it takes longer."""
        prefetch, self.current = self.current, None
        if prefetch is None:
            return
        prefetch.cancel("the checkpointer was stopped")
        if not prefetch.wait(timeout_s):
            logging.warning("a prefetch waits for other processes still; it is left behind")
