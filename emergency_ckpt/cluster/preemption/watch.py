"""Preemption notices: the step at which all processes act on one, and the time that is left.

JAX's sync manager takes SIGTERM at any process and agrees, in the background, on the next call
that all processes make. It identifies calls by number and answers yes once, at the number after the
highest that any process had used. So the numbers must rise by one with each step and be equal on
all processes. Steps do not qualify: they jump at a restore, and a notice in between would wait for
a step that never comes. The numbers here continue from the highest that any process has used,
agreed at each start and restore (``go_on_from``).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from absl import logging
from jax.experimental import multihost_utils

from emergency_ckpt.cluster.coordination import Coordinator, jax_hears_notices
from emergency_ckpt.cluster.messages import number_of
from emergency_ckpt.cluster.preemption import signals
from emergency_ckpt.errors import CheckpointError, CoordinationError

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``; a supervisor treats it as a death and restarts."""
_GOOD_ENDS = (None, 0, PREEMPTED_EXIT_CODE)


_LOOK_S = 1.0
_TOLD_PAUSE_S = 0.05


def is_good_end(error: BaseException | None) -> bool:
    """Return whether a ``with`` block that ``error`` ends has come to its end as intended."""
    return error is None or (isinstance(error, SystemExit) and error.code in _GOOD_ENDS)


class Notices(Protocol):
    """A source of notices. ``last_number``: the highest number that this process has used."""

    @property
    def source(self) -> str: ...
    @property
    def last_number(self) -> int: ...

    def reached(self, number: int) -> bool:
        """Return True, once, when all processes act on a notice at their call with ``number``."""
        ...

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        ...


class JaxNotices:
    """JAX's sync manager, which ``jax.distributed.initialize`` starts. About 13 us per call.

    There is one per process, so its numbers are shared by all checkpointers.
    """

    source = "jax"
    last_number = 0

    def reached(self, number: int) -> bool:
        JaxNotices.last_number = number
        return multihost_utils.reached_preemption_sync_point(number)

    def close(self) -> None:
        """Nothing to do: JAX keeps its handler until the process ends."""


class SignalNotices:
    """SIGTERM in a job of one process that runs without ``jax.distributed``."""

    source = "signals"

    def __init__(self) -> None:
        self.last_number = 0
        self._noticed = signals.SIGTERM.subscribe()

    def close(self) -> None:
        signals.SIGTERM.unsubscribe(self._noticed)

    def reached(self, number: int) -> bool:
        self.last_number = number
        if not self._noticed.is_set():
            return False
        self._noticed.clear()
        return True


class AgreedNotices:
    """SIGTERM at any process where JAX's preemption service is off; agreed through our own keys.

    1. A thread looks once a second for a notice of any process.
    2. Each process then publishes the number of its last call, and blocks in its next call.
    3. When all have published, they act at the number after the highest, which none has passed.
    """

    source = "signals, agreed"

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        """``timeout_s``: maximum wait of a call, after a notice, for the others' numbers."""
        self.last_number = 0
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._noticed = signals.SIGTERM.subscribe()
        self._changed = threading.Condition()
        self._is_told = False
        self._sync: int | None = None
        self._is_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eckpt-notices", daemon=True)
        self._thread.start()

    def reached(self, number: int) -> bool:
        with self._changed:
            # After publishing its last number, this process must not pass the agreed one.
            self._changed.wait_for(lambda: not self._is_told or self._is_over, self._timeout_s)
            self.last_number = number
            return number == self._sync

    def close(self) -> None:
        self._stopping.set()
        signals.SIGTERM.unsubscribe(self._noticed)
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._is_noticed():
                    self._agree()
                    return
            except CheckpointError as error:
                logging.warning("preemption notices cannot be read at the moment: %s", error)
            self._stopping.wait(_LOOK_S)

    def _is_noticed(self) -> bool:
        if self._noticed.is_set():
            self._coordinator.replace("preempt/notice", b"")
            return True
        return self._coordinator.find("preempt/notice") is not None

    def _agree(self) -> None:
        coordinator = self._coordinator
        try:
            with self._changed:
                self._is_told, last = True, self.last_number
            coordinator.replace(f"preempt/at/{coordinator.process_index}", str(last).encode())
            deadline_s = time.monotonic() + self._timeout_s
            while not self._stopping.is_set():
                told = coordinator.list("preempt/at")
                if len(told) == coordinator.process_count:
                    self._act_after(told)
                    return
                if time.monotonic() > deadline_s:
                    missing = [p for p in range(coordinator.process_count) if str(p) not in told]
                    logging.error("preemption notice: no answer from processes %s", missing[:8])
                    return
                self._stopping.wait(_TOLD_PAUSE_S)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _act_after(self, told: Mapping[str, bytes]) -> None:
        try:
            numbers = [number_of(data, f"preempt/at/{p}") for p, data in told.items()]
        except CoordinationError as error:
            # All processes read the same values, so none acts.
            logging.error("a preemption notice cannot be acted on: %s", error)
            return
        with self._changed:
            self._sync = max(numbers) + 1


def find_notices(coordinator: Coordinator, timeout_s: float) -> Notices:
    """Return JAX's service as the source of notices, or our own handler where that is off."""
    if jax_hears_notices():
        return JaxNotices()
    return (
        SignalNotices() if coordinator.process_count == 1 else AgreedNotices(coordinator, timeout_s)
    )


class PreemptionWatch:
    """The preemption state of the job, for the training thread.

    A call costs about 13 us per step and does not block, except right after a notice, while JAX's
    manager determines the sync point.
    """

    def __init__(self, notices: Notices | None, *, grace_s: float) -> None:
        """``grace_s``: time from the sync point to the end. ``notices`` None: none is watched."""
        self._notices = notices
        self.source = "" if notices is None else notices.source
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
        """Continue from ``number``, the highest that any process has used: the same call on all."""
        self._number = number
        self._asked_at = None

    @property
    def sync_step(self) -> int | None:
        """The step at which all processes act on the notice; None before it."""
        return self._sync_step

    def reached(self, step: int) -> bool:
        """Return whether ``step`` is the sync point or later. Queries the source once per step."""
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
            "preemption notice: all processes act on it at step %d; %g s are left",
            step,
            self._grace_s,
        )
        return True

    def reached_at_end(self) -> bool:
        """Return whether a notice came since the last step, by one more query."""
        step, self._asked_at = self._asked_at, None
        return step is not None and self._sync_step is None and self.reached(step)

    def grace_left_s(self) -> float:
        """Return the seconds left of the grace period, at least 0. Only after the sync point."""
        assert self._sync_step is not None, "no notice was seen"
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Stop watching. Idempotent; call in the thread that made the watch."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
