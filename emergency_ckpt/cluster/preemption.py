"""Preemption notices: SIGTERM, the step at which all processes act on one, and the time left.

SIGTERM is JAX's, where its service is on. Its sync manager takes it at any process and agrees, in
the background, on the next call that all processes make. It identifies calls by number and answers
yes once, at the number after the highest that any process had used. So the numbers must rise by one
with each step and be equal on all processes. Steps do not qualify: they jump at a restore, and a
notice in between would wait for a step that never comes. The numbers here continue from the highest
that any process has used, agreed at each start and restore (``PreemptionWatch.go_on_from``).

Every other notice, and SIGTERM where JAX's service is off, is agreed on by the same rule through
keys of our own (``AgreedNotices``):

1. A thread of each process looks for a notice: its own, or the key ``preempt/notice`` of another.
2. It then publishes the number of its process's last call, and the next call blocks.
3. The leader takes all numbers and publishes the one after the highest, which none has passed. All
   act at their first call with that number or a higher one. Higher ones occur only where a start or
   a restore let all processes go on from one higher number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Protocol

from absl import logging
from jax.experimental import multihost_utils

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.cluster.coordination import (
    Coordinator,
    by_process,
    jax_hears_notices,
    number_of,
)
from emergency_ckpt.cluster.notice_sources import NoticePolls, NoticeSource
from emergency_ckpt.errors import CheckpointError, CoordinationError
from emergency_ckpt.events import EventSink

_STDERR = 2
_ENDING = (signal.SIGTERM, signal.SIGINT)
_FIRST_SIGNAL = (
    b"WARNING: saves in progress have some time to finish; a second signal ends the process\n"
)


class SigtermListener:
    """One handler for all checkpointers of the process.

    It is set only in the main thread, and only where no other handler is set.
    """

    def __init__(self) -> None:
        self._flags: list[SignalFlag] = []

    def subscribe(self) -> SignalFlag:
        """Return a flag that is set at each SIGTERM from now on."""
        flag = SignalFlag()
        self._flags.append(flag)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
        return flag

    def unsubscribe(self, flag: SignalFlag) -> None:
        """Unsubscribe; the last one restores the earlier handler. Idempotent."""
        if flag in self._flags:
            self._flags.remove(flag)
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if not self._flags and ours and _in_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        for flag in self._flags:
            flag.set()


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
_NOTICE, _LAST, _SYNC = "preempt/notice", "preempt/at", "preempt/sync"
_NO_SYNC = b"none"


class SignalNotices:
    """Notices in a job of one process."""

    source = "signals"

    def __init__(self, *, takes_sigterm: bool = True) -> None:
        """``takes_sigterm``: SIGTERM is a notice; else only ``notice`` gives one."""
        self.last_number = 0
        self._noticed = SIGTERM.subscribe() if takes_sigterm else SignalFlag()

    def notice(self) -> None:
        """Act at the next call. Any thread."""
        self._noticed.set()

    def close(self) -> None:
        """Restore the handler that was set before."""
        SIGTERM.unsubscribe(self._noticed)

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
        self._noticed = SIGTERM.subscribe() if takes_sigterm else SignalFlag()
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
        SIGTERM.unsubscribe(self._noticed)
        self._noticed.set()  # wakes the thread
        self._thread.join(2 * _INSPECTION_S)

    def _pause_s(self, shortest_s: float) -> float:
        """Return the time between two calls of the service, longer with more processes."""
        return max(shortest_s, self._coordinator.process_count / _CALLS_PER_S)

    def _run(self) -> None:
        pause_s = self._pause_s(_INSPECTION_S)
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


PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``; a supervisor treats it as a death and restarts."""
_GOOD_ENDS = (None, 0, PREEMPTED_EXIT_CODE)


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

    def notice(self) -> None:
        """Have all processes act at one of their next calls. Returns at once; any thread."""
        ...

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        ...


class JaxNotices:
    """SIGTERM by JAX's sync manager, and all other notices agreed through our own keys.

    Each says yes at one number, equal on all processes, so all act at the lower of the two. A call
    takes about 13 us. There is one manager in a process, so all checkpointers share its numbers.
    """

    source = "jax"
    _last_of_jax = 0

    def __init__(self, own: SignalNotices | AgreedNotices) -> None:
        """``own``: takes no signal."""
        self._own = own

    @property
    def last_number(self) -> int:
        return max(JaxNotices._last_of_jax, self._own.last_number)

    def reached(self, number: int) -> bool:
        JaxNotices._last_of_jax = number
        is_reached = multihost_utils.reached_preemption_sync_point(number)
        return is_reached or self._own.reached(number)

    def notice(self) -> None:
        self._own.notice()

    def close(self) -> None:
        self._own.close()


def find_notices(coordinator: Coordinator, timeout_s: float) -> Notices:
    """Return the source of notices: SIGTERM is taken by JAX's service, or by us where that is off.

    ``timeout_s``: maximum wait, after a notice, for the numbers of all processes.
    """
    by_jax = jax_hears_notices()
    if coordinator.process_count == 1:
        own: SignalNotices | AgreedNotices = SignalNotices(takes_sigterm=not by_jax)
    else:
        own = AgreedNotices(coordinator, timeout_s, takes_sigterm=not by_jax)
    return JaxNotices(own) if by_jax else own


class PreemptionWatch:
    """The preemption state of the job, for the training thread.

    A call costs about 13 us per step and does not block, except right after a notice, while JAX's
    manager or ours determines the sync point.
    """

    def __init__(self, notices: Notices | None, *, grace_s: float) -> None:
        """``grace_s``: time from the sync point to the end. ``notices`` None: none is watched."""
        self._notices = notices
        self._polls: NoticePolls | None = None
        self.source = "" if notices is None else notices.source
        self._grace_s = grace_s
        self._number = 0
        self._asked_at: int | None = None
        self._sync_step: int | None = None
        self._deadline_s = 0.0

    def poll(self, sources: Sequence[NoticeSource], events: EventSink) -> None:
        """Look for notices of ``sources`` in the background, too. Once; not without notices."""
        assert self._notices is not None, "no notice is watched"
        if sources:
            self._polls = NoticePolls(sources, events, self._notices.notice)

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
        if self._polls is not None:
            self._polls.close()
        if self._notices is not None:
            self._notices.close()
            self._notices = None
