"""Preemption notices: the step at which all processes act on one, and the time that is left.

JAX's sync manager takes SIGTERM at any process and agrees, in the background, on the next call
that all processes make. It knows calls by numbers and answers yes once, at the number after the
highest that any process had called with. So the numbers must rise by one with each step and be
alike everywhere: steps will not do, as they jump at a restore, and a notice that came meanwhile
would wait for a step that never comes. The numbers here go on from the highest that any process
has used, agreed at each start and restore (``going_on``).
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, Protocol

import jax
from absl import logging
from jax.experimental import multihost_utils

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``: a supervisor takes it for a death and starts again."""


class Notices(Protocol):
    """Where notices come from. ``last_number``: the highest that this process has asked with."""

    @property
    def last_number(self) -> int: ...

    def reached(self, number: int) -> bool:
        """Whether all processes act on a notice at their call with ``number``; True once."""
        ...

    def close(self) -> None:
        """Leave signals as they were found."""
        ...


class JaxNotices:
    """JAX's sync manager, which ``jax.distributed.initialize`` starts. About 13 us per call.

    There is one per process, so its numbers are shared by all checkpointers.
    """

    last_number = 0

    def reached(self, number: int) -> bool:
        JaxNotices.last_number = number
        return multihost_utils.reached_preemption_sync_point(number)

    def close(self) -> None:
        """Nothing to do: JAX keeps its handler until the process ends."""


class SignalNotices:
    """SIGTERM in a job of one process that runs without ``jax.distributed``.

    The handler is set only in the main thread, and only where nobody else has set one.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self._noticed = threading.Event()
        if threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._on_signal)

    def close(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: Any) -> None:
        del signum, frame
        self._noticed.set()

    def reached(self, number: int) -> bool:
        self.last_number = number
        if not self._noticed.is_set():
            return False
        self._noticed.clear()
        return True


def find_notices() -> Notices:
    """The source of notices in this process."""
    return JaxNotices() if jax.distributed.is_initialized() else SignalNotices()


class PreemptionWatch:
    """Knows whether the job is being preempted. For the training thread.

    Asking costs about 13 us per step and waits for nobody, but in the moment after a notice, when
    JAX's manager makes out the sync point.
    """

    def __init__(self, notices: Notices | None, *, grace_s: float) -> None:
        """``grace_s``: from the sync point to the end of the process. None: no notice is heeded."""
        self._notices = notices
        self._grace_s = grace_s
        self._number = 0
        self._asked_at: int | None = None
        self._sync_step: int | None = None
        self._deadline_s = 0.0

    @property
    def last_number(self) -> int:
        """The highest number that this process has used."""
        return 0 if self._notices is None else self._notices.last_number

    def go_on_from(self, number: int) -> None:
        """The highest that any process has used: the same call on all."""
        self._number = number
        self._asked_at = None

    @property
    def sync_step(self) -> int | None:
        """The step at which all processes act on the notice; None before it."""
        return self._sync_step

    def reached(self, step: int) -> bool:
        """Whether ``step`` is the sync point or after it. Asks anew once for each step."""
        if self._notices is None:
            return False
        if self._sync_step is not None:
            return True
        if step == self._asked_at:
            return False
        self._asked_at = step
        self._number += 1
        if not self._notices.reached(self._number):
            return False
        self._sync_step = step
        self._deadline_s = time.monotonic() + self._grace_s
        logging.warning(
            "preemption notice: all processes save step %d; %g s are left", step, self._grace_s
        )
        return True

    def grace_left_s(self) -> float:
        """Seconds until the end; 0 when it is over. Only after the sync point."""
        assert self._sync_step is not None, "no notice was seen"
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Heed no more notices. Idempotent; in the thread that made the watch."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
