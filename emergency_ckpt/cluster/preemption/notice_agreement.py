"""Agreement on the step at which all processes act on a notice that any of them has.

1. A thread of each process looks for a notice: its own, or the key ``preempt/notice`` of another.
2. It then publishes the number of its process's last call, and the next call blocks.
3. The leader takes all numbers and publishes the one after the highest, which none has passed. All
   act at their first call with that number or a higher one.

Higher ones occur only where a start or a restore let all processes go on from one higher number.
"""

from __future__ import annotations

import threading
import time

from absl import logging

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.messages import by_process, number_of
from emergency_ckpt.cluster.preemption import signals
from emergency_ckpt.errors import CheckpointError, CoordinationError

_LOOK_S = 1.0
_TOLD_PAUSE_S = 0.05
_CALLS_PER_S = 500.0
"""What all processes together may ask of the coordination service, which answers some 2,500."""
_NOTICE, _LAST, _SYNC = "preempt/notice", "preempt/at", "preempt/sync"
_NO_SYNC = b"none"


class SignalNotices:
    """Notices in a job of one process."""

    source = "signals"

    def __init__(self, *, takes_sigterm: bool = True) -> None:
        """``takes_sigterm``: SIGTERM is a notice; else only ``notice`` gives one."""
        self.last_number = 0
        self._noticed = signals.SIGTERM.subscribe() if takes_sigterm else SignalFlag()

    def notice(self) -> None:
        """Act at the next call. Any thread."""
        self._noticed.set()

    def close(self) -> None:
        """Restore the handler that was set before."""
        signals.SIGTERM.unsubscribe(self._noticed)

    def reached(self, number: int) -> bool:
        """As ``Notices.reached``."""
        self.last_number = number
        if not self._noticed.is_set():
            return False
        self._noticed.clear()
        return True


class AgreedNotices:
    """Notices at any process, agreed through keys of our own."""

    source = "signals, agreed"

    def __init__(
        self, coordinator: Coordinator, timeout_s: float, *, takes_sigterm: bool = True
    ) -> None:
        """``timeout_s``: maximum wait, after a notice, for the numbers of all processes."""
        self.last_number = 0
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._noticed = signals.SIGTERM.subscribe() if takes_sigterm else SignalFlag()
        self._changed = threading.Condition()
        self._is_told = False
        self._sync: int | None = None
        self._is_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eckpt-notices", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Have all processes act at one of their next calls. Returns at once; any thread."""
        self._noticed.set()

    def reached(self, number: int) -> bool:
        """As ``Notices.reached``. Blocks right after a notice, until the leader's decision."""
        # In this order, without a lock: the thread sets the flag before it reads the number.
        self.last_number = number
        if not self._is_told:
            return False
        # The number that was published may be the one before: it must not be passed until decided.
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, 3 * self._timeout_s)
            return self._sync is not None and number >= self._sync

    def close(self) -> None:
        """End the thread, and restore the handler that was set before."""
        self._stopping.set()
        signals.SIGTERM.unsubscribe(self._noticed)
        self._noticed.set()  # wakes the thread
        self._thread.join(2 * _LOOK_S)

    def _pause_s(self, shortest_s: float) -> float:
        """Return the time between two calls of the service, longer with more processes."""
        return max(shortest_s, self._coordinator.process_count / _CALLS_PER_S)

    def _run(self) -> None:
        pause_s = self._pause_s(_LOOK_S)
        while not self._stopping.is_set():
            try:
                if self._is_noticed():
                    self._agree()
                    return
            except CheckpointError as error:
                logging.warning("preemption notices cannot be read at the moment: %s", error)
                self._stopping.wait(pause_s)
                continue
            self._noticed.wait(pause_s)

    def _is_noticed(self) -> bool:
        if self._noticed.is_set():
            if not self._stopping.is_set():
                self._coordinator.replace(_NOTICE, b"")
            return True
        return self._coordinator.find(_NOTICE) is not None

    def _agree(self) -> None:
        """Take part in the agreement, to its end; a service that fails for a time is asked again.

        Calls go on blocking meanwhile: a process that went on could pass the agreed number.
        """
        self._is_told = True
        last = self.last_number
        is_leader = self._coordinator.process_index == 0
        deadline_s = time.monotonic() + (1 if is_leader else 2) * self._timeout_s
        has_told = False
        try:
            while not self._stopping.is_set() and time.monotonic() <= deadline_s:
                try:
                    if not has_told:
                        key = f"{_LAST}/{self._coordinator.process_index}"
                        self._coordinator.replace(key, str(last).encode())
                        has_told = True
                    if self._is_decided(is_leader=is_leader):
                        return
                except CheckpointError as error:
                    logging.warning("the agreement on a notice is held up: %s", error)
                self._stopping.wait(self._pause_s(_TOLD_PAUSE_S))
            if not self._stopping.is_set():
                self._give_up(is_leader=is_leader)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _is_decided(self, *, is_leader: bool) -> bool:
        decision = self._decision() if is_leader else self._coordinator.find(_SYNC)
        if decision is None:
            return False
        if is_leader:
            self._coordinator.replace(_SYNC, decision)
        if decision != _NO_SYNC:
            try:
                number = number_of(decision, _SYNC)
            except CoordinationError as error:
                logging.error("a preemption notice cannot be acted on: %s", error)
                return True
            with self._changed:
                self._sync = number
        return True

    def _decision(self) -> bytes | None:
        """Return the leader's decision; None while numbers are missing."""
        coordinator = self._coordinator
        told = by_process(coordinator.list(_LAST), _LAST, coordinator.process_count)
        if len(told) < coordinator.process_count:
            return None
        try:
            return str(max(number_of(n, f"{_LAST}/{p}") for p, n in told.items()) + 1).encode()
        except CoordinationError as error:
            logging.error("a preemption notice cannot be acted on: %s", error)
            return _NO_SYNC

    def _give_up(self, *, is_leader: bool) -> None:
        logging.error("a preemption notice is not acted on: not all processes answered in time")
        if is_leader:
            try:
                told = self._coordinator.list(_LAST)
                missing = [p for p in range(self._coordinator.process_count) if str(p) not in told]
                logging.error("no answer from processes %s", missing[:8])
                self._coordinator.replace(_SYNC, _NO_SYNC)
            except CheckpointError as error:
                logging.error("the others learn of it by their own deadlines: %s", error)
