"""Preemption notices: their sources, the step at which all processes act, and the time left.

A notice comes from SIGTERM, from JAX's own preemption service, or from a call of
``request_preemption`` in any thread of any process. The processes agree on the call at which all
act:

1. A thread of each process looks for a notice: its own, or the key ``preempt/notice`` of another.
2. The thread publishes the number of its process's last call, and the next call blocks.
3. The leader reads the numbers and publishes, once, the number after the highest, which no process
   that answered has passed. Each process acts at its first call with that number or a higher one.

A process whose loop has ended publishes, before any notice, a number that no call has. So either
all processes act on a notice that comes while they end, or none does, and none waits.

Calls are numbered and not named by their steps, since steps jump at a restore: a notice in between
would wait for a step that never comes. At each start and restore, the numbers of all processes
continue from the highest that any process has used (``PreemptionWatch.go_on_from``).

JAX's own agreement is not used: a rank that is gone delays JAX's agreement by three minutes, and it
answers once in the life of a process. Where JAX's service is on, that service must still agree on
each notice before the leader decides. Otherwise JAX might receive a SIGTERM while the processes end
after another kind of notice, and delay their end by those three minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from absl import logging

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    jax_has_answers,
    jax_has_notice,
    jax_hears_notices,
    number_of,
    tell_jax_of_notice,
)
from emergency_ckpt.cluster.round import Cell
from emergency_ckpt.core.limits import MAX_INT
from emergency_ckpt.core.save.ending import deadline_of
from emergency_ckpt.errors import CheckpointError, CoordinationError
from emergency_ckpt.events import EventSink

_STDERR = 2
_ENDING = (signal.SIGTERM, signal.SIGINT)
_FIRST_SIGNAL = (
    b"WARNING: saves in progress have some time to finish; a second signal ends the process\n"
)


class SigtermListener:
    """The handler of SIGTERM for all checkpointers of the process. Only the main thread can set it.

    It also calls the handler that was set before, if that is a Python function. JAX's preemption
    service has a handler in C, which Python does not know. Where no Python handler was set, JAX's
    handler stays, and ``jax_has_notice`` finds its notices.

    Attributes:
      is_ending: the process ends and has removed the handler itself (``second_signal_ends``).
    """

    def __init__(self) -> None:
        self.is_ending = False
        self._flags: list[SignalFlag] = []
        self._handler: Callable[[int, FrameType | None], None] | None = None
        """The handler that was set last; None before the first."""
        self._earlier: Any = signal.SIG_DFL
        """The handler that was found; None: a handler in C, which Python cannot set again."""

    def subscribe(self) -> SignalFlag:
        """Return a flag that is set at each SIGTERM from now on."""
        flag = SignalFlag()
        self._flags.append(flag)
        earlier = signal.getsignal(signal.SIGTERM)
        is_of_jax = earlier is signal.SIG_DFL and jax_hears_notices()
        if _in_main_thread() and not self._is_set and not is_of_jax:
            self._earlier, self._handler = earlier, self._handler_before(earlier)
            signal.signal(signal.SIGTERM, self._handler)
        return flag

    def unsubscribe(self, flag: SignalFlag) -> None:
        """Unsubscribe ``flag``; after the last flag, restore the earlier handler. Idempotent."""
        if flag in self._flags:
            self._flags.remove(flag)
        self.leave_unless_used()

    def leave_unless_used(self) -> None:
        """Without a flag, restore the earlier handler; in the main thread, which alone can."""
        if self._flags or self.is_ending or not _in_main_thread():
            return
        if self._is_set:
            earlier = signal.SIG_DFL if self._earlier is None else self._earlier
            signal.signal(signal.SIGTERM, earlier)
        self._handler = None

    @property
    def problem(self) -> str:
        """The reason why SIGTERM may be no notice in this process; empty where it is a notice."""
        if self._is_set or self.is_ending:
            return ""
        if self._handler is not None or (
            jax_hears_notices() and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return (
                "a handler of SIGTERM was set after the checkpointer was made: SIGTERM is a notice"
                " only if that handler calls the one that signal.signal returned, or"
                " request_preemption"
            )
        if jax_hears_notices():
            return ""
        return (
            "the checkpointer was made outside of the main thread, which alone can set a handler of"
            " SIGTERM: make it there, or call request_preemption"
        )

    @property
    def _is_set(self) -> bool:
        return self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler

    def _handler_before(self, earlier: object) -> Callable[[int, FrameType | None], None]:
        """Return a handler that sets all flags and then calls ``earlier``."""
        process = os.getpid()

        def on_signal(signum: int, frame: FrameType | None) -> None:
            for flag in self._flags:
                flag.set()
            if callable(earlier):
                earlier(signum, frame)
            elif earlier is not signal.SIG_IGN and (not self._flags or os.getpid() != process):
                # No checkpointer is left, or this is a fork: the signal ends the process as usual.
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)

        return on_signal


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
        # The second signal needs no handler, so it also ends a wait that no handler interrupts.
        for kind in _ENDING:
            signal.signal(kind, signal.SIG_DFL)
        # Not by logging: the signal may interrupt a write to the same stream, which then refuses
        # a second one, and the line would be lost.
        with contextlib.suppress(OSError):
            os.write(_STDERR, _FIRST_SIGNAL)

    SIGTERM.is_ending = True
    before = {kind: signal.signal(kind, on_signal) for kind in _ENDING}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        SIGTERM.is_ending = False
        SIGTERM.leave_unless_used()  # the last checkpointer may have ended inside


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_INSPECTION_S = 1.0
_TOLD_PAUSE_S = 0.05
_CALLS_PER_S = 500.0
"""Calls of the coordination service by all processes together; it answers some 2,500."""
_PAUSES = 3
"""A process needs at most so many pauses between two looks at the service to answer."""
_ENDS_AFTER = 3
"""An agreement without a decision ends after so many waits of the leader."""
_NOTICE, _LAST, _SYNC = "preempt/notice", "preempt/at", "preempt/sync"
_ENDED = MAX_INT
"""The number of a process whose loop has ended: no call has this number, so no process acts."""
_ENDED_ANSWER = str(_ENDED).encode()


class OwnNotices:
    """Notices at this process: all notices of a job of one process.

    Attributes:
      last_number: the highest number that this process has used.
    """

    def __init__(self, events: EventSink | None = None) -> None:
        """``events``: gets one event, if SIGTERM may be no notice."""
        self.last_number = 0
        self._events = events
        self._noticed = SIGTERM.subscribe()

    @property
    def noticed_s(self) -> float:
        """The time of the notice at this process, by ``time.monotonic``; 0 before."""
        return self._noticed.set_s

    def reached(self, number: int) -> bool:
        """Return True, once, when all processes act on a notice at their call with ``number``."""
        self.last_number = number
        self._check_sigterm()
        if not self._noticed.is_set():
            return False
        self._noticed.clear()
        return True

    def notice(self) -> None:
        """Have all processes act at one of their next calls. Returns at once; any thread."""
        self._noticed.set()

    def end(self) -> None:
        """Report to the others that no call follows. Blocks for one message; never raises."""

    def close(self) -> None:
        """Restore the signal handler that was set before. In the main thread. Idempotent."""
        SIGTERM.unsubscribe(self._noticed)

    def _check_sigterm(self) -> None:
        """Emit an event, once, where SIGTERM may be no notice: nothing else shows it."""
        if self._events is not None and (problem := SIGTERM.problem):
            self._events.emit("preemption.unheard", source="SIGTERM", text=problem)
            self._events = None


class AgreedNotices(OwnNotices):
    """Notices at any process of a job, on which the processes agree as the module describes."""

    def __init__(
        self, coordinator: Coordinator, timeout_s: float, events: EventSink | None = None
    ) -> None:
        """``timeout_s``: maximum wait of the leader, after a notice, for the numbers of all."""
        super().__init__(events)
        self._coordinator = coordinator
        self._is_leader = coordinator.process_index == 0
        pause_s = self._pause_s(_INSPECTION_S)
        self._timeout_s = max(timeout_s, _PAUSES * pause_s)
        self._is_over = threading.Event()
        self._told_s = 0.0
        self._is_told = False
        self._has_ended = False
        self._sync: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[pause_s], name="eckpt-notices", daemon=True
        )
        self._thread.start()

    @property
    def noticed_s(self) -> float:
        return self._told_s

    def reached(self, number: int) -> bool:
        """As ``OwnNotices.reached``. Blocks right after a notice, until there is a decision."""
        # In this order, without a lock: the thread sets the flag before it reads the number.
        self.last_number = number
        if not self._is_told:
            return False
        # The thread may have published the previous number. Training must not pass ``number``
        # before the decision, which may be ``number`` itself.
        left_s = self._told_s + _ENDS_AFTER * self._timeout_s - time.monotonic()
        self._is_over.wait(max(0.0, left_s))
        return self._sync is not None and number >= self._sync

    def end(self) -> None:
        self._has_ended = True
        try:
            self._answer(_ENDED)
        except CheckpointError as error:
            # A process that gets a notice now waits for this process as for one that is gone.
            logging.info("the loop ends without a report to the other processes: %s", error)

    def close(self) -> None:
        """As ``OwnNotices.close``; also ends the thread."""
        self._stopping.set()
        super().close()
        self._noticed.set()  # wakes the thread
        self._thread.join(2 * _INSPECTION_S)

    def _pause_s(self, shortest_s: float) -> float:
        """Return the time between two calls of the service, longer with more processes."""
        return max(shortest_s, self._coordinator.process_count / _CALLS_PER_S)

    def _run(self, pause_s: float) -> None:
        while not self._stopping.is_set():
            self._check_sigterm()
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
        # A notice that JAX has received is a key for all processes: the leader looks for all.
        if self._noticed.is_set() or (self._is_leader and jax_has_notice()):
            if not self._stopping.is_set():
                self._coordinator.replace(_NOTICE, b"")
            return True
        return self._coordinator.find(_NOTICE) is not None

    def _agree(self) -> None:
        """Take part in the agreement, to its end; repeat calls while the service fails for a time.

        The leader decides when all have answered, or when it has waited ``timeout_s``, so that a
        process that is gone does not cost the others their time. Any other process decides when it
        has waited twice as long, since the leader may be late itself. The first decision counts.
        """
        self._told_s = time.monotonic()
        self._is_told = True
        last = self.last_number
        patience_s = (1 if self._is_leader else 2) * self._timeout_s
        has_told = False
        try:
            while not self._stopping.is_set():
                waited_s = time.monotonic() - self._told_s
                try:
                    if not has_told:
                        self._answer(last)
                        if self._is_leader:
                            tell_jax_of_notice()
                        has_told = True
                    if self._take_decision(is_late=waited_s > patience_s):
                        return
                except CheckpointError as error:
                    logging.warning("the agreement on a notice is held up: %s", error)
                if waited_s > _ENDS_AFTER * self._timeout_s:
                    logging.error("a preemption notice is not acted on: there is no decision")
                    return
                self._stopping.wait(self._pause_s(_TOLD_PAUSE_S))
        finally:
            self._is_over.set()

    def _answer(self, number: int) -> None:
        key = f"{_LAST}/{self._coordinator.process_index}"
        self._coordinator.replace(key, str(number).encode())
        if self._has_ended and number != _ENDED:
            # ``end`` has run in the other thread meanwhile.
            self._coordinator.replace(key, _ENDED_ANSWER)

    def _take_decision(self, *, is_late: bool) -> bool:
        """Take the decision for this process; return whether there is one.

        This process decides itself if it ``is_late``, or if it leads and has the numbers of all, or
        if it finds that the leader's loop has ended.
        """
        cell = Cell(self._coordinator, _SYNC)
        decision = cell.find()
        may_decide = is_late or self._is_leader
        if decision is None and not may_decide:
            may_decide = self._coordinator.find(f"{_LAST}/0") == _ENDED_ANSWER
        if decision is None and may_decide:
            number = self._number(is_late=is_late)
            if number is not None:
                decision = cell.settle(str(number).encode())
        if decision is None:
            return False
        try:
            number = number_of(decision, _SYNC)
        except CoordinationError as error:
            logging.error("a preemption notice cannot be acted on: %s", error)
            return True
        if number > _ENDED:
            logging.warning("a preemption notice is not acted on: a process has ended its loop")
        self._sync = number
        return True

    def _number(self, *, is_late: bool) -> int | None:
        """Return the number after the highest; None while answers are missing, unless ``is_late``.

        A process whose loop has ended decides for all: no process acts. A process without a
        readable answer acts at its first call with that number or a higher one.
        """
        count = self._coordinator.process_count
        numbers: dict[int, int] = {}
        for process, text in by_process(self._coordinator.list(_LAST), _LAST, count).items():
            try:
                numbers[process] = number_of(text, f"{_LAST}/{process}")
            except CoordinationError as error:
                logging.error("a process's place after a preemption notice is unknown: %s", error)
        if _ENDED in numbers.values():
            return _ENDED + 1
        has_all = len(numbers) == count and jax_has_answers(count)
        if not numbers or not (has_all or is_late):
            return None
        if len(numbers) < count:
            missing = [process for process in range(count) if process not in numbers]
            logging.error("a preemption notice has no answer from processes %s", missing[:8])
        return max(numbers.values()) + 1


PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status with ``on_preemption="exit"``; a supervisor treats it as a death and restarts."""
_SUCCESS = (None, 0)


def is_success(error: BaseException | None) -> bool:
    """Return whether a program that ends by ``error`` has the exit status of success."""
    return error is None or (isinstance(error, SystemExit) and error.code in _SUCCESS)


def is_good_end(error: BaseException | None) -> bool:
    """Return whether a ``with`` block that ends by ``error`` has ended as intended."""
    is_preempted = isinstance(error, SystemExit) and error.code == PREEMPTED_EXIT_CODE
    return is_preempted or is_success(error)


_PARTS_OF_GRACE = 3


def find_notices(coordinator: Coordinator, grace_s: float, events: EventSink) -> OwnNotices:
    """Return the notices of a job of any size. ``grace_s``: time from a notice to the kill."""
    if coordinator.process_count == 1 and not jax_hears_notices():
        return OwnNotices(events)
    return AgreedNotices(coordinator, grace_s / _PARTS_OF_GRACE, events)


class PreemptionWatch:
    """The preemption state of the job, for the training thread.

    Calls do not block, except right after a notice, while the processes agree.

    Attributes:
      sync_step: the step at which all processes act on the notice; None before it.
    """

    def __init__(self, notices: OwnNotices | None, *, grace_s: float) -> None:
        """``grace_s``: time from the notice to the kill. ``notices`` None: watch no notices."""
        self._notices = notices
        self._grace_s = grace_s
        self._number = 0
        self._asked_at: int | None = None
        self.sync_step: int | None = None
        self._deadline_s = 0.0

    def request(self) -> None:
        """Give a notice, as any process may; all act on it. Returns at once; from any thread.

        CheckpointError: notices are not watched, or no longer.
        """
        notices = self._notices
        if notices is None:
            hint = "set on_preemption='save'; after stop it is too late"
            raise CheckpointError("request", "a preemption save", "no notice is heeded", hint=hint)
        notices.notice()

    @property
    def last_number(self) -> int:
        """The highest number that this process has used."""
        return 0 if self._notices is None else self._notices.last_number

    def go_on_from(self, number: int) -> None:
        """Continue from ``number``, the highest that any process has used."""
        self._number = number
        self._asked_at = None

    def reached(self, step: int) -> bool:
        """Return whether ``step`` is the sync point or later. Asks the notices once per step."""
        if self._notices is None:
            return False
        if self.sync_step is not None:
            return True
        if step == self._asked_at:
            return False
        self._asked_at = step
        self._number += 1
        if not self._notices.reached(self._number):
            return False
        self.sync_step = step
        noticed_s = self._notices.noticed_s
        self._deadline_s = deadline_of(noticed_s, self._grace_s, time.monotonic())
        logging.warning(
            "preemption notice: all processes act on it at step %d; %.1f s are left",
            step,
            self.grace_left_s(),
        )
        return True

    @property
    def is_on(self) -> bool:
        """Return whether notices are watched, before ``close``. Any thread."""
        return self._notices is not None

    @property
    def overdue_s(self) -> float | None:
        """The seconds since a notice on which this process has not acted; None without a notice.

        From any thread.
        """
        notices = self._notices
        if notices is None or self.sync_step is not None or not notices.noticed_s:
            return None
        return time.monotonic() - notices.noticed_s

    def reached_at_end(self) -> bool:
        """Return whether a notice came since the last step, by one last look."""
        step, self._asked_at = self._asked_at, None
        if step is not None and self.sync_step is None and self.reached(step):
            return True
        if self._notices is not None and self.sync_step is None:
            self._notices.end()
        return False

    def grace_left_s(self) -> float:
        """Return the seconds left of the grace period, at least 0. Only after the sync point."""
        assert self.sync_step is not None, "no notice was seen"
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Stop watching. Idempotent; call in the thread that made the watch."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None
