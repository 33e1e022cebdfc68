"""The larger half of a restore ahead of it, in a thread of its own, while the caller compiles."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from absl import logging

from emergency_ckpt.core.restore.plan_types import NoPlan
from emergency_ckpt.core.restore.prefetch import PrefetchReport
from emergency_ckpt.errors import CheckpointError, DeadlineExceeded, RestoreFailed
from emergency_ckpt.restore.execution import RestoreExecution
from emergency_ckpt.restore.protocol import AttemptCancelled, PlanFailed, no_plan_error
from emergency_ckpt.restore.request import RestoredState, RestoreParts, RestoreRequest

_CHECK_INTERVAL_S = 0.1
_GRACE_S = 5.0
"""Added to a deadline that another thread keeps, before it is given up."""


class Prefetch:
    """One prefetch; collective, as a restore is. ``number`` is the same everywhere.

    The thread starts with the object. Until ``take`` or ``cancel`` it holds the state on the
    devices, and with it the memory that is lent to its arrays. All methods may be called from any
    thread; none is collective.

    Args:
      after: one that was given up; this one waits for its end.
      saves_ended: whether no save of this process is under way, waiting so many seconds for it.
      held: keeps persistent steps from being removed.
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
        self._request = request
        self._number = number
        self._after = after
        self._saves_ended = saves_ended
        self._held = held
        self._execution = RestoreExecution(parts, request, f"prefetch/{number}")
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended_s = 0.0
        self._cancelled_for = ""
        self._restored_state: RestoredState | None = None
        self._error: CheckpointError | None = None
        self.is_taken = False
        self._started_s = time.monotonic()
        parts.events.emit("prefetch.started", requested_step=request.requested_step)
        threading.Thread(target=self._run, name="eckpt-prefetch", daemon=True).start()

    # The thread.

    def _run(self) -> None:
        try:
            self._bring()
        except Exception as error:  # noqa: BLE001 - the next restore tells it
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
                outcome = self._execution.run(self, PrefetchReport())
            finally:
                # Also what was fetched just now: until a restore says what may go, all stays.
                parts.tier.protect([held.save for held in parts.tier.held()[0]])
        if isinstance(outcome, RestoredState):
            with self._lock:
                if not self._cancelled_for:
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
        while not self.is_cancelled and not ended(_CHECK_INTERVAL_S):
            if time.monotonic() > self._execution.deadline_s:
                raise DeadlineExceeded("prefetch", "the state", f"{what} has not ended")

    def _find_nothing(self, outcome: NoPlan) -> None:
        for note in outcome.notes:
            self._parts.events.emit("restore.note", text=note)
        self.cancel("it found nothing")
        self._parts.events.emit("prefetch.nothing")

    def _fail(self, error: Exception) -> None:
        if isinstance(error, AttemptCancelled):
            self.cancel(error.problem)  # here nobody has asked for that yet
        if self.is_cancelled:
            self._parts.events.emit("prefetch.given_up", reason=self._cancelled_for[:500])
            return
        if not isinstance(error, CheckpointError):
            unexpected = f"unexpected {type(error).__name__}: {error}"
            failure = RestoreFailed("prefetch", "the state", unexpected)
            failure.__cause__ = error
            error = failure
        trace = "".join(traceback.format_exception(error))
        part: BaseException | None = error
        while part is not None:
            part.__traceback__ = None  # its frames hold shards, and so lent memory
            part = part.__cause__ or part.__context__
        with self._lock:
            self._error = error
        self._parts.events.emit("prefetch.failed", reason=str(error)[:500])
        logging.warning("prefetch failed: %s", trace)

    # As the attempt of its ``RestoreExecution``.

    def check(self) -> None:
        """AttemptCancelled when it was meanwhile: the others shall not wait for this one."""
        with self._lock:
            reason = self._cancelled_for
        if reason:
            raise AttemptCancelled("prefetch", "the state", f"it was given up: {reason}")

    def apply_host_state(self, restored: RestoredState) -> None:
        """Host states are applied by ``restore`` alone."""

    def undo(self) -> None:
        """Nothing of the caller's was touched."""

    # For the training thread.

    def cancel(self, reason: str) -> None:
        """It is not wanted any more: let go of what it holds, and end soon. Does not wait.

        An error that it has met stays, for the next restore to tell.
        """
        with self._lock:
            if self._error is None:
                self._cancelled_for = self._cancelled_for or reason
            self._restored_state = None

    @property
    def is_cancelled(self) -> bool:
        """Return whether ``cancel`` was called."""
        return bool(self._cancelled_for)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when the thread has ended, or at the latest a little after its deadline.

        True when it has.
        """
        if timeout_s is None:
            timeout_s = max(0.0, self._execution.deadline_s - time.monotonic()) + _GRACE_S
        return self._ended.wait(timeout_s)

    def decision_on(self, request: RestoreRequest) -> PrefetchReport:
        """Return the answer of this process to ``request``."""
        with self._lock:
            if self._cancelled_for:
                return PrefetchReport("unfit", self._number, self._cancelled_for)
            if self._error is not None:
                return PrefetchReport("failed", self._number, str(self._error)[:1000])
            if not self._ended.is_set():
                return PrefetchReport("failed", self._number, "it has not ended in time")
            different = _difference(self._request, request)
            if different:
                return PrefetchReport("unfit", self._number, different)
            return PrefetchReport("ready", self._number)

    def take(self) -> RestoredState:
        """Return the restored state, once: from then on it is the caller's alone."""
        with self._lock:
            restored_state, self._restored_state = self._restored_state, None
            assert restored_state is not None, "it was said to be ready, and is taken once"
            self.is_taken = True
            return restored_state

    def take_error(self) -> CheckpointError | None:
        """Return the error that ended it; None when it did not fail."""
        with self._lock:
            return self._error

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
        if self.current is not None and not self.current.is_cancelled:
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
        return self.current.wait

    def before_removal(self, step: int) -> None:
        """Give up the prefetch, which may have ``step``, before that is removed. Waits for it."""
        if self.current is not None:
            self.current.cancel(f"step {step} was removed before the restore")
            self.current.wait()

    def forget(self) -> None:
        """A restore is over, and with it the prefetch, unless its thread hangs."""
        if self.current is not None and self.current.wait(0):
            self.current = None

    def end(self, timeout_s: float) -> None:
        """Give up the one under way; its thread is left behind if it takes longer."""
        prefetch, self.current = self.current, None
        if prefetch is None:
            return
        prefetch.cancel("the checkpointer was stopped")
        if not prefetch.wait(timeout_s):
            logging.warning("a prefetch waits for other processes still; it is left behind")


def _difference(prefetched: RestoreRequest, asked: RestoreRequest) -> str:
    """In what the two differ; empty when one will do for the other."""
    if prefetched.requested_step != asked.requested_step:
        return f"step {prefetched.requested_step} was prefetched, not {asked.requested_step}"
    if prefetched.wants_host_state != asked.wants_host_state:
        return "with host state and without are not the same"
    if prefetched.tree != asked.tree or _host_types(prefetched) != _host_types(asked):
        return "another state was prefetched"
    return ""


def _host_types(request: RestoreRequest) -> list[tuple[type[Any], object]]:
    """Type and dtype of each host value: the dtype also tells the byte order."""
    flat = jax.tree_util.tree_leaves(request.like)
    values = (flat[leaf.position] for leaf in request.tree.leaves if leaf.sharding is None)
    return [(type(value), getattr(value, "dtype", None)) for value in values]
