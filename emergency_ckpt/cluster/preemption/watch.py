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
from collections.abc import Mapping
from typing import Protocol

from absl import logging
from jax.experimental import multihost_utils

from emergency_ckpt.cluster.coordination import Coordinator, jax_hears_notices
from emergency_ckpt.cluster.messages import number_of
from emergency_ckpt.cluster.preemption import signals
from emergency_ckpt.errors import CheckpointError, CoordinationError

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``: a supervisor takes it for a death and starts again."""
_GOOD_ENDS = (None, 0, PREEMPTED_EXIT_CODE)


_LOOK_S = 1.0
_TOLD_PAUSE_S = 0.05


def is_good_end(error: BaseException | None) -> bool:
    """Return whether a ``with`` block that ``error`` ends has come to its end as intended."""
    return error is None or (isinstance(error, SystemExit) and error.code in _GOOD_ENDS)


class Notices(Protocol):
    """Where notices come from. ``last_number``: the highest that this process has asked with."""

    @property
    def source(self) -> str: ...
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
    """SIGTERM at any process, where JAX's preemption service is off; agreed by our own means.

    A thread looks once a second for a notice of any process. Then each tells the number of its
    last call and answers the next one only when all have told: they act at the number after the
    highest, which none of them has got past.
    """

    source = "signals, agreed"

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        """``timeout_s``: how long a call may wait, after a notice, for the others to tell."""
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
            # Once it has told its last number, this process must not go past the one agreed on.
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
                logging.warning("no preemption notice can be heard for now: %s", error)
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
                    logging.error("preemption notice: no word from processes %s", missing[:8])
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
            # To all alike: nobody acts, rather than some.
            logging.error("a preemption notice cannot be acted on: %s", error)
            return
        with self._changed:
            self._sync = max(numbers) + 1


def find_notices(coordinator: Coordinator, timeout_s: float) -> Notices:
    """The source of notices in this process: JAX's service, or our own handler where it is off."""
    if jax_hears_notices():
        return JaxNotices()
    return (
        SignalNotices() if coordinator.process_count == 1 else AgreedNotices(coordinator, timeout_s)
    )


class PreemptionWatch:
    """Knows whether the job is being preempted. For the training thread.

    Asking costs about 13 us per step and waits for nobody, but in the moment after a notice, when
    JAX's manager makes out the sync point.
    """

    def __init__(self, notices: Notices | None, *, grace_s: float) -> None:
        """``grace_s``: from the sync point to the end of the process. None: no notice is heeded."""
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
            "preemption notice: all processes act on it at step %d; %g s are left",
            step,
            self._grace_s,
        )
        return True

    def reached_at_end(self) -> bool:
        """Whether a notice has come since the last step: look once more, as if at another one."""
        step, self._asked_at = self._asked_at, None
        return step is not None and self._sync_step is None and self.reached(step)

    def grace_left_s(self) -> float:
        """Seconds until the end; 0 when it is over. Only after the sync point."""
        assert self._sync_step is not None, "no notice was seen"
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Heed no more notices. Idempotent; in the thread that made the watch."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
