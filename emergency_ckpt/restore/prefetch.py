"""Steps 1 to 6 of a restore ahead of it, in a thread of its own, while the caller compiles."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from absl import logging

from emergency_ckpt.errors import CheckpointError, DeadlineExceeded
from emergency_ckpt.restore.dialogue import AttemptCancelled
from emergency_ckpt.restore.request import RestoreParts, RestoreRequest
from emergency_ckpt.restore.restore import PlacedState, Restore

_CHECK_INTERVAL_S = 0.1
_GRACE_S = 5.0
"""Added to a deadline that another thread keeps, before it is given up."""


class Prefetch:
    """One restore in a thread of its own, and the cache that it leaves on this process's devices.

    Collective, as a restore is. The thread starts with the object. All methods may be called from
    any thread; none is collective.

    Args:
      number: the same everywhere.
      after: one that was given up; this one waits for its end.
      saves_ended: whether no save of this process is under way, waiting so many seconds for it.
      held: keeps persistent steps from being removed.

    Attributes:
      placed: the cache.
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
        self.placed = PlacedState()
        self._restore = Restore(
            parts,
            request,
            f"prefetch/{number}",
            host_state=None,
            placed=self.placed,
            check=self._check,
        )
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_left_behind = False
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
            self.placed.end()
            self._ended.set()

    def _bring(self) -> None:
        parts, after, self._after = self._parts, self._after, None
        if after is not None:
            self._wait_until(after.wait, "the prefetch before it")
        self._wait_until(self._saves_ended, "the save before it")
        with self._held():
            try:
                restored = self._restore.run()
            finally:
                with self._lock:
                    if not self._is_left_behind:
                        # Also what was fetched: until a restore says what may go, all stays.
                        parts.tier.protect([held.save for held in parts.tier.held()[0]])
        if restored is None:
            self.placed.cancel("it found nothing")
            parts.events.emit("prefetch.nothing")
            return
        self.placed.put(restored)
        seconds = time.monotonic() - self._started_s
        parts.events.emit("prefetch.finished", step=restored.save.step, seconds=seconds)

    def _wait_until(self, ended: Callable[[float], bool], what: str) -> None:
        # Given up, it still goes on to where it tells the others: they would wait for it.
        while not self.placed.cancelled_for and not ended(_CHECK_INTERVAL_S):
            if time.monotonic() > self._restore.deadline_s:
                raise DeadlineExceeded("prefetch", "the state", f"{what} has not ended")

    def _check(self) -> None:
        """AttemptCancelled when it was meanwhile: the others shall not wait for this one."""
        if self.placed.cancelled_for:
            problem = f"it was given up: {self.placed.cancelled_for}"
            raise AttemptCancelled("prefetch", "the state", problem)

    def _fail(self, error: Exception) -> None:
        """Tell of the error, once: the restore after it meets the cause itself, if it lasts."""
        if isinstance(error, AttemptCancelled):
            self.placed.cancel(error.problem)  # here nobody has asked for that yet
        if self.placed.cancelled_for:
            self._parts.events.emit("prefetch.given_up", reason=self.placed.cancelled_for[:500])
            return
        self.placed.cancel(f"it failed: {error}"[:500])
        self._parts.events.emit("prefetch.failed", reason=str(error)[:500])
        is_typed = isinstance(error, CheckpointError)
        logging.warning(
            "prefetch failed: %s", error if is_typed else "".join(traceback.format_exception(error))
        )

    # For the training thread.

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when the thread has ended, or at the latest a little after its deadline.

        True when it has, or was left behind.
        """
        if timeout_s is not None or self._is_left_behind:
            return self._is_left_behind or self._ended.wait(timeout_s)
        while (left_s := self._restore.deadline_s + _GRACE_S - time.monotonic()) > 0:
            if self._ended.wait(left_s):
                return True
        return False

    def wait_for_state(self) -> PlacedState | None:
        """Return what it has brought, if anything, when its thread has ended or should have."""
        if not self.placed.cancelled_for and not self.wait():
            self.placed.cancel("it has not ended in time")
        if self.placed.cancelled_for:
            self.give_way()
        return self.placed if self.placed.is_there else None

    def give_way(self) -> None:
        """Return when the thread, which was cancelled, has ended or changes RAM no more.

        It may wait for storage that does not answer. Blocks for a quarter of ``save_timeout_s`` at
        most, so that a save has its time.
        """
        if not self.wait(self._parts.config.save_timeout_s / 4):
            with self._lock:
                self._is_left_behind = True
            logging.warning("a prefetch that was given up still waits; it is left behind")


class Prefetches:
    """The prefetches of one checkpointer: at most one waits for its restore. One thread uses it."""

    def __init__(self, parts: RestoreParts) -> None:
        self._parts = parts
        self._count = 0
        self._current: Prefetch | None = None

    def start(
        self,
        request: RestoreRequest,
        saves_ended: Callable[[float], bool],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin one; see ``Prefetch``. CheckpointError when one waits for its restore already."""
        if self._current is not None and not self._current.placed.cancelled_for:
            hint = "call restore first"
            raise CheckpointError("prefetch", "state", "there is one already", hint=hint)
        number, self._count = self._count, self._count + 1
        self._current = Prefetch(
            self._parts, request, number, after=self._current, saves_ended=saves_ended, held=held
        )

    @contextmanager
    def for_restore(self) -> Generator[PlacedState | None]:
        """Give a restore what was prefetched, when that has ended; release it at the end.

        It is given once, also when the restore does not use it.
        """
        prefetch, self._current = self._current, None
        if prefetch is None:
            yield None
            return
        try:
            yield prefetch.wait_for_state()
        finally:
            prefetch.placed.cancel("the restore ended without it")
            if not prefetch.placed.is_used:
                reason = prefetch.placed.cancelled_for
                self._parts.events.emit("prefetch.unused", reason=reason)

    def before_save(self, step: int) -> Callable[[], object] | None:
        """A save comes first: its background part is to call what this returns, if anything.

        The newest step is another one then, and two may not write at once.
        """
        if self._current is None:
            return None
        self._current.placed.cancel(f"step {step} was saved before the restore")
        return self._current.give_way

    def before_removal(self, step: int) -> None:
        """Give up the prefetch, which may have ``step``, before that is removed. Waits for it."""
        if self._current is not None:
            self._current.placed.cancel(f"step {step} was removed before the restore")
            self._current.give_way()

    def end(self, timeout_s: float) -> None:
        """Give up the one under way; its thread is left behind if it takes longer."""
        prefetch, self._current = self._current, None
        if prefetch is None:
            return
        prefetch.placed.cancel("the checkpointer was stopped")
        if not prefetch.wait(timeout_s):
            logging.warning("a prefetch waits for other processes still; it is left behind")
