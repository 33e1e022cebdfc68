"""Observers: they receive a checkpointer's events, and learn of its start, its steps and its end.

``on_event`` takes observers, and functions of an event.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from emergency_ckpt.events import Event

if TYPE_CHECKING:
    from emergency_ckpt.cluster.coordination import Coordinator
    from emergency_ckpt.events import EventSink


class AtStep(NamedTuple):
    """The place of this process in its training loop.

    Attributes:
      step: the last step that the loop has named; None before the first after a start or a restore.
      call: the method of the checkpointer that the training thread is in; empty outside.
      still_s: seconds since the step, or since the training thread entered or left ``call`` or a
        part of it.
      call_limit_s: longest time for which ``call`` may wait for a checkpoint.
    """

    step: int | None
    call: str
    still_s: float
    call_limit_s: float


class StepProgress:
    """The steps of the training thread, for any thread: a write is one assignment, without a lock.

    Attributes:
      thread: identity of the thread that has named the newest step.
    """

    def __init__(self) -> None:
        self._watchers: tuple[Callable[[int], None], ...] = ()
        self._step: int | None = None
        self.thread = get_ident()
        self._now: tuple[int | None, str, float, float] = (None, "", 0.0, 0.0)

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Call ``watcher`` with each new step that the loop names.

        The training thread waits for the call, which takes microseconds and raises nothing.
        """
        self._watchers = (*self._watchers, watcher)

    def note(self, step: int) -> None:
        """Note that the loop is at ``step``; the same step again is no progress."""
        if step != self._step:
            self._step = step
            self.thread = get_ident()
            self._now = (step, "", 0.0, time.monotonic())
            for watcher in self._watchers:
                watcher(step)

    @contextlib.contextmanager
    def inside(self, call: str, limit_s: float) -> Generator[None]:
        """Hold that the process is in ``call``, which may wait ``limit_s`` for checkpoints.

        Inside another call the part ``call`` has a limit of its own, and the other call's limit
        counts from the end of that part. For the training thread.
        """
        _, outer, outer_limit_s, _ = self._now
        self._now = (self._step, call, limit_s, time.monotonic())
        try:
            yield
        finally:
            self._now = (self._step, outer, outer_limit_s, time.monotonic())

    def restart(self) -> None:
        """Forget the step: a restore begins, and the step after it may be compiled first."""
        self._step = None
        self._now = (None, "", 0.0, time.monotonic())

    def read(self) -> AtStep:
        step, call, limit_s, since_s = self._now
        return AtStep(step, call, time.monotonic() - since_s, limit_s)


@dataclass(frozen=True, eq=False)
class JobView:
    """The parts of a job that an observer may use; of each checkpointer another one.

    Attributes:
      coordinator: keys of its own are below a name of its own, and gone when it has left.
      events: takes events of the observer's own.
      progress: of this process's training loop.
      host: address on which this process may serve: ``bind_host``, else loopback.
      request_preemption: gives notice of a preemption, as any thread of any process may.
        CheckpointError: the job heeds no notices, or no longer.
    """

    coordinator: Coordinator
    events: EventSink
    progress: StepProgress
    host: str
    request_preemption: Callable[[], None]


class Observer:
    """Base of an observer; each method may be left as it is.

    An observer that is given to several checkpointers, one after the other or at once, is called
    for each of them: it keeps what it begins by its ``JobView``.
    """

    def __call__(self, event: Event) -> None:
        """Take an event, in the thread that emits it.

        An error is logged and has no effect. ``sys.exit`` ends the program in the main thread, and
        is an error in other threads.
        """

    def begin(self, process_index: int) -> None:
        """Called before the first event. An error ends the start on this process."""

    def join(self, job: JobView) -> None:
        """Called once the processes of the job have met. An error ends the start on all of them."""

    def leave(self, job: JobView) -> None:
        """Called when this process makes no more steps of ``job``, also after an error of ``join``.

        Idempotent; must not raise.
        """

    def close(self) -> None:
        """Called at the end, and after a start that failed, once for each ``begin``."""


OnEvent = Callable[[Event], None] | str
"""A function of an event, an ``Observer``, or the text of an extra, as ``"prometheus(9400)"``."""
