"""Preemption notices: where they come from, the step at which all act on one, and the time left.

A notice comes from SIGTERM, from JAX's own preemption service, or from a call of
``request_preemption`` in any thread of any process. The processes agree on one call of all:

1. A thread of each process looks for a notice: its own, or the key ``preempt/notice`` of another.
2. The thread publishes the number of its process's last call, and the next call blocks.
3. The leader takes the numbers and publishes the one after the highest, which no process that
   answered has passed. Each acts at its first call with that number or a higher one.

Calls are numbered and not named by their steps, since steps jump at a restore: a notice in between
would wait for a step that never comes. The numbers of all processes continue from the highest that
any of them has used, at each start and restore (``PreemptionWatch.go_on_from``).

JAX's own agreement is not used: a rank that is gone holds it up for three minutes, it answers once
in the life of a process, and one process alone does not have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Any, Protocol

from absl import logging

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    jax_has_notice,
    jax_hears_notices,
    number_of,
)
from emergency_ckpt.errors import CheckpointError, CoordinationError
from emergency_ckpt.events import EventSink

_STDERR = 2
_ENDING = (signal.SIGTERM, signal.SIGINT)
_FIRST_SIGNAL = (
    b"WARNING: saves in progress have some time to finish; a second signal ends the process\n"
)


_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGACTION_BYTES = 1024
"""More than ``struct sigaction`` of any C library on Linux; its handler is the first member."""
_NO_FUNCTIONS = (0, 1)
"""Addresses that are no functions: SIG_DFL and SIG_IGN."""


def _sigterm_action() -> Any:
    """Return ``struct sigaction`` of SIGTERM. Python's own record lacks what C has set."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if _LIBC.sigaction(signal.SIGTERM, None, action):
        raise OSError(ctypes.get_errno(), "sigaction")
    return action


def _address_of(action: Any) -> int:
    return ctypes.c_void_p.from_buffer(action).value or 0


class SigtermListener:
    """One handler of SIGTERM for all checkpointers of the process.

    Only the main thread can set it. The handler that was there before is called too: a function of
    the user's, and JAX's, which is C and which Python does not know.
    """

    def __init__(self) -> None:
        self._flags: list[SignalFlag] = []
        self._earlier: Any = signal.SIG_DFL
        self._earlier_action: Any = None
        """``struct sigaction`` of a handler that is not Python's; None where there was none."""
        self._was_set = self._is_inside = False

    def subscribe(self) -> SignalFlag:
        """Return a flag that is set at each SIGTERM from now on."""
        flag = SignalFlag()
        self._flags.append(flag)
        if _in_main_thread() and not self._is_set:
            action = _sigterm_action()
            self._earlier = signal.signal(signal.SIGTERM, self._on_signal)
            is_of_c = _address_of(action) not in (*_NO_FUNCTIONS, _address_of(_sigterm_action()))
            self._earlier_action = action if is_of_c else None
            self._was_set = True
        return flag

    def unsubscribe(self, flag: SignalFlag) -> None:
        """Unsubscribe; the last one restores the earlier handler. Idempotent."""
        if flag in self._flags:
            self._flags.remove(flag)
        if self._flags:
            return
        self._was_set = False
        if self._is_set and _in_main_thread():
            earlier = signal.SIG_DFL if self._earlier is None else self._earlier
            signal.signal(signal.SIGTERM, earlier)
            if self._earlier_action is not None:
                _LIBC.sigaction(signal.SIGTERM, self._earlier_action, None)

    @property
    def problem(self) -> str:
        """The reason why SIGTERM is no notice in this process; empty where it is one."""
        if self._is_set:
            return ""
        if self._was_set:
            return (
                "another handler of SIGTERM was set after the checkpointer was made: let it call"
                " the handler that signal.signal returned, or request_preemption"
            )
        if jax_hears_notices():
            return ""  # its own handler, in any thread
        return (
            "the checkpointer was made outside of the main thread, which alone can set a handler of"
            " SIGTERM: make it there, or call request_preemption"
        )

    @property
    def _is_set(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        for flag in self._flags:
            flag.set()
        if self._is_inside:
            return  # the earlier handler calls this one, as whoever keeps a chain may
        self._is_inside = True
        try:
            if self._earlier_action is not None:
                ctypes.CFUNCTYPE(None, ctypes.c_int)(_address_of(self._earlier_action))(signum)
            if callable(self._earlier):
                self._earlier(signum, frame)
        finally:
            self._is_inside = False


SIGTERM = SigtermListener()


@contextlib.contextmanager
def second_signal_ends() -> Generator[None]:
    """Let a second SIGTERM or SIGINT end the process at once, inside this context.

    For a process that is about to end. Only in the main thread. Handlers that Python does not know
    (JAX's) are not restored.
    """
    if not _in_main_thread():
        yield
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        # The second one needs no handler, so that it also ends a wait that no handler interrupts.
        for kind in _ENDING:
            signal.signal(kind, signal.SIG_DFL)
        # Not by logging: the signal may interrupt a write to the same stream, which then refuses
        # a second one, and the line would be lost.
        with contextlib.suppress(OSError):
            os.write(_STDERR, _FIRST_SIGNAL)

    before = {kind: signal.signal(kind, on_signal) for kind in _ENDING}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_INSPECTION_S = 1.0
_TOLD_PAUSE_S = 0.05
_CALLS_PER_S = 500.0
"""What all processes together may ask of the coordination service, which answers some 2,500."""
_PAUSES = 3
"""So many pauses between two looks at the service are time enough to answer."""
_NOTICE, _LAST, _SYNC = "preempt/notice", "preempt/at", "preempt/sync"


class JobNotices(Protocol):
    """The notices of a job. ``last_number``: the highest number that this process has used."""

    @property
    def last_number(self) -> int: ...

    def reached(self, number: int) -> bool:
        """Return True, once, when all processes act on a notice at their call with ``number``."""
        ...

    def notice(self) -> None:
        """Have all processes act at one of their next calls. Returns at once; any thread."""
        ...

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        ...


class OwnNotices:
    """Notices in a job of one process."""

    def __init__(self) -> None:
        self.last_number = 0
        self._noticed = SIGTERM.subscribe()

    def notice(self) -> None:
        """As ``JobNotices.notice``."""
        self._noticed.set()

    def close(self) -> None:
        """As ``JobNotices.close``."""
        SIGTERM.unsubscribe(self._noticed)

    def reached(self, number: int) -> bool:
        """As ``JobNotices.reached``."""
        self.last_number = number
        if not self._noticed.is_set():
            return False
        self._noticed.clear()
        return True


class AgreedNotices:
    """Notices at any process of a job, agreed as the module says."""

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        """``timeout_s``: maximum wait of the leader, after a notice, for the numbers of all."""
        self.last_number = 0
        self._coordinator = coordinator
        self._is_leader = coordinator.process_index == 0
        pause_s = self._pause_s(_INSPECTION_S)
        self._timeout_s = max(timeout_s, _PAUSES * pause_s)
        self._noticed = SIGTERM.subscribe()
        self._changed = threading.Condition()
        self._is_told = False
        self._sync: int | None = None
        self._is_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[pause_s], name="eckpt-notices", daemon=True
        )
        self._thread.start()

    def notice(self) -> None:
        """As ``JobNotices.notice``."""
        self._noticed.set()

    def reached(self, number: int) -> bool:
        """As ``JobNotices.reached``. Blocks right after a notice, until the leader's decision."""
        # In this order, without a lock: the thread sets the flag before it reads the number.
        self.last_number = number
        if not self._is_told:
            return False
        # The number that was published may be the one before: it must not be passed until decided.
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, _PAUSES * self._timeout_s)
            return self._sync is not None and number >= self._sync

    def close(self) -> None:
        """End the thread, and restore the handler that was set before."""
        self._stopping.set()
        SIGTERM.unsubscribe(self._noticed)
        self._noticed.set()  # wakes the thread
        self._thread.join(2 * _INSPECTION_S)

    def _pause_s(self, shortest_s: float) -> float:
        """Return the time between two calls of the service, longer with more processes."""
        return max(shortest_s, self._coordinator.process_count / _CALLS_PER_S)

    def _run(self, pause_s: float) -> None:
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
        # A notice that JAX has taken is a key for all processes: the leader looks for all.
        if self._noticed.is_set() or (self._is_leader and jax_has_notice()):
            if not self._stopping.is_set():
                self._coordinator.replace(_NOTICE, b"")
            return True
        return self._coordinator.find(_NOTICE) is not None

    def _agree(self) -> None:
        """Take part in the agreement, to its end; a service that fails for a time is asked again.

        Calls go on blocking meanwhile: a process that went on could pass the agreed number. The
        leader waits for the numbers of all, and then decides without those that did not answer: a
        process that is gone must not cost the others their time. The others wait twice as long.
        """
        self._is_told = True
        last = self.last_number
        began_s = time.monotonic()
        has_told = False
        try:
            while not self._stopping.is_set():
                waited_s = time.monotonic() - began_s
                try:
                    if not has_told:
                        key = f"{_LAST}/{self._coordinator.process_index}"
                        self._coordinator.replace(key, str(last).encode())
                        has_told = True
                    if self._is_leader:
                        self._decide(is_late=waited_s > self._timeout_s)
                    if self._take_decision():
                        return
                except CheckpointError as error:
                    logging.warning("the agreement on a notice is held up: %s", error)
                if waited_s > 2 * self._timeout_s:
                    logging.error("a preemption notice is not acted on: the leader did not answer")
                    return
                self._stopping.wait(self._pause_s(_TOLD_PAUSE_S))
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take_decision(self) -> bool:
        """Return whether there is a decision, which this process then takes."""
        decision = self._coordinator.find(_SYNC)
        if decision is None:
            return False
        try:
            number = number_of(decision, _SYNC)
        except CoordinationError as error:
            logging.error("a preemption notice cannot be acted on: %s", error)
            return True
        with self._changed:
            self._sync = number
        return True

    def _decide(self, *, is_late: bool) -> None:
        """Publish the number at which all act; while answers are missing, only if it ``is_late``.

        Who did not answer, or not with a number, acts at the first call after that one.
        """
        count = self._coordinator.process_count
        numbers: dict[int, int] = {}
        for process, text in by_process(self._coordinator.list(_LAST), _LAST, count).items():
            try:
                numbers[process] = number_of(text, f"{_LAST}/{process}")
            except CoordinationError as error:
                logging.error("a process's place after a preemption notice is unknown: %s", error)
        if not numbers or (len(numbers) < count and not is_late):
            return
        if len(numbers) < count:
            missing = [process for process in range(count) if process not in numbers]
            logging.error("a preemption notice has no answer from processes %s", missing[:8])
        self._coordinator.replace(_SYNC, str(max(numbers.values()) + 1).encode())


PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``; a supervisor treats it as a death and restarts."""
_GOOD_ENDS = (None, 0, PREEMPTED_EXIT_CODE)


def is_good_end(error: BaseException | None) -> bool:
    """Return whether a ``with`` block that ``error`` ends has come to its end as intended."""
    return error is None or (isinstance(error, SystemExit) and error.code in _GOOD_ENDS)


_PARTS_OF_GRACE = 3


def find_notices(coordinator: Coordinator, grace_s: float) -> JobNotices:
    """Return the notices of a job of any size. ``grace_s``: what is left after one to save."""
    if coordinator.process_count == 1:
        return OwnNotices()
    return AgreedNotices(coordinator, grace_s / _PARTS_OF_GRACE)


class PreemptionWatch:
    """The preemption state of the job, for the training thread.

    A call does not block, except right after a notice, while the processes agree.
    """

    def __init__(
        self, notices: JobNotices | None, *, grace_s: float, events: EventSink | None = None
    ) -> None:
        """Watch ``notices``; None: none.

        Args:
          grace_s: time from the sync point to the end.
          events: learns, once, of a SIGTERM that would be no notice.
        """
        self._notices = notices
        self._events = events
        self._grace_s = grace_s
        self._number = 0
        self._asked_at: int | None = None
        self._sync_step: int | None = None
        self._deadline_s = 0.0

    def request(self) -> None:
        """Give notice, as any process may; all act on it. Returns at once; any thread.

        CheckpointError: no notices are watched, or no longer.
        """
        notices = self._notices
        if notices is None:
            hint = "set save_on_preemption; after stop it is too late"
            raise CheckpointError("request", "a preemption save", "no notice is heeded", hint=hint)
        notices.notice()

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
        self._check_sigterm()
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

    def _check_sigterm(self) -> None:
        """Say once when SIGTERM is no notice: what takes the handler away says nothing itself."""
        if self._events is not None and SIGTERM.problem:
            self._events.emit("preemption.unheard", source="SIGTERM", text=SIGTERM.problem)
            self._events = None

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
