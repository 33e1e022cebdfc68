"""Background work: a thread for it, a record of failures, waits beside signals, the program's end.

Python runs a signal handler in the main thread, between two instructions. So a handler must take no
lock: the interrupted code may hold the lock. And a signal that comes just before the main thread
blocks does not wake that thread: the handler runs when the wait is over.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
import math
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Container, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pools
from typing import Protocol, TypeVar

from absl import logging

from emergency_ckpt import _native
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.core.wording import unexpected_text
from emergency_ckpt.errors import CheckpointError, SaveFailed

_T = TypeVar("_T")
_LOWEST_PRIORITY = 19
"""The highest niceness on Linux."""
SAVE_NICENESS = 10
"""Niceness of the threads that save: where cores are scarce, training goes first."""

# Steps, times and random names, which differ between two occurrences of one failure.
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")
_PIECE_S = 0.5
"""Longest time until a handler runs whose signal came just before a wait."""


@contextlib.contextmanager
def no_garbage_collection() -> Generator[None]:
    """Suspend garbage collection for work that makes many objects at once, and no cycles.

    The collector would walk all objects of the process again and again: a fifth of the time of a
    large job's plan.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_PROBE_BYTES = 16 << 20


def copy_threads() -> int:
    """Return the number of threads that copy and check.

    The first call on a machine with many cores measures one thread for some milliseconds. The
    threads have the niceness of the thread that starts them: those of saves yield to training.
    """
    cores = len(os.sched_getaffinity(0))
    return threads_for(cores, _rate_of_one_thread) if cores > 1 else 1


@functools.lru_cache(maxsize=1)
def _rate_of_one_thread() -> float:
    """Return the GB/s at which one thread copies into shared memory with CRC32C."""
    memory = new_memory("eckpt-rate", _PROBE_BYTES)
    data = bytes(_PROBE_BYTES)
    seconds: list[float] = []
    for _ in range(3):  # the first makes the pages
        began_s = time.perf_counter()
        _native.copy_crc32c(memory, [(data, 0)], 1)
        seconds.append(time.perf_counter() - began_s)
    memory.close()
    return _PROBE_BYTES / 1e9 / min(seconds)


def new_memory(name: str, size_bytes: int) -> _native.Mapping:
    """Return memory outside of the ramdisk, freed with its last view. OSError: there is none."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size_bytes)
        return _native.Mapping(file, size_bytes, writable=True)
    finally:
        os.close(file)


class Closeable(Protocol):
    def close(self) -> None: ...


class Failures:
    """Errors of background work: their number, and the newest error until a call raises it.

    Also the newest step whose save to storage has failed, until storage has that step or a later
    one: the end of a run raises the error of that save.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: CheckpointError | None = None
        self._lost: tuple[int, CheckpointError] | None = None
        self._count = 0
        self._repeats = Repeats()

    @property
    def count(self) -> int:
        """Number of failures since the start, including those already raised."""
        return self._count

    def record(
        self,
        error: CheckpointError,
        *,
        cause: BaseException | None = None,
        lost_step: int | None = None,
    ) -> None:
        """Log ``error`` and keep it for ``raise_pending``.

        The first of its kind is logged with the traceback of its ``cause``, later ones at intervals
        with their number. ``lost_step``: the step that storage lacks because of ``error``.
        """
        if cause is not None:
            error.__cause__ = cause
        self._log(error)
        for part in _causes(error):
            part.__traceback__ = None  # its frames hold the snapshot
        with self._lock:
            self._count += 1
            self._pending = error
            if lost_step is not None:
                self._lost = lost_step, error

    def _log(self, error: CheckpointError) -> None:
        with self._lock:
            mention = self._repeats.occurred(_NUMBER.sub("#", str(error)), time.monotonic())
        if mention is None:
            return
        if mention:
            logging.error("%s (%d times since this was last logged)", error, mention)
            return
        # As text, because a log handler that keeps records would keep the frames and the snapshot.
        cause = error.__cause__
        trace = "" if cause is None else "\n" + "".join(traceback.format_exception(cause))
        logging.error("%s%s", error, trace)

    def raise_pending(self) -> None:
        """Raise the newest error that was not raised before, if any, and forget the others."""
        with self._lock:
            pending, self._pending = self._pending, None
            if self._lost is not None and self._lost[1] is pending:
                self._lost = None  # the caller knows it now
        if pending is not None:
            raise pending

    def note_stored(self, step: int) -> None:
        """Storage has ``step``: a failed save of an earlier step is made good."""
        with self._lock:
            if self._lost is not None and self._lost[0] <= step:
                self._lost = None

    def note_restored(self, step: int) -> None:
        """The job goes on from ``step``: a failed save of a later step belongs to the past."""
        with self._lock:
            if self._lost is not None and self._lost[0] > step:
                self._lost = None

    def take_lost(self) -> tuple[int, CheckpointError] | None:
        """Return the newest step that storage lacks, with its error, once; None without one."""
        with self._lock:
            lost, self._lost = self._lost, None
        return lost


def _causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and its causes and contexts, every error once: these may form cycles."""
    errors: dict[int, BaseException] = {}
    left: list[BaseException | None] = [error]
    while left:
        part = left.pop()
        if part is not None and id(part) not in errors:
            errors[id(part)] = part
            left += (part.__cause__, part.__context__)
    return list(errors.values())


class SignalFlag:
    """A flag like ``threading.Event``, which a signal handler may set."""

    def __init__(self) -> None:
        self._is_set = False
        self.set_s = 0.0
        """When it was set first since it was cleared, by ``time.monotonic``."""
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Set the flag and wake one that waits. Any thread, and any signal handler."""
        if not self._is_set:
            self.set_s = time.monotonic()
        self._is_set = True
        self._wakes.put(None)  # reentrant, as documented

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, None: without end; return whether it is. One thread only."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set:
            left_s = _PIECE_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=min(left_s, _PIECE_S))
        return self._is_set


def wait_for(changed: threading.Condition, is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Wait as ``changed.wait_for`` does, but in pieces: signal handlers run after each piece."""
    deadline_s = time.monotonic() + timeout_s
    while not (is_met := changed.wait_for(is_so, max(0.0, min(timeout_s, _PIECE_S)))):
        timeout_s = deadline_s - time.monotonic()
        if timeout_s <= 0:
            break
    return is_met


def join(thread: threading.Thread, timeout_s: float) -> bool:
    """Wait as ``thread.join`` does, in such pieces; return whether the thread has ended."""
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        thread.join(min(left_s, _PIECE_S))
    return not thread.is_alive()


class BackgroundWorker:
    """Runs one piece of work at a time. Call ``submit`` and ``wait_idle`` from one thread.

    Work that raises is recorded in ``failures`` and does not end the thread. ``niceness`` is added
    to that of the creating thread, for this thread and the threads that this thread starts.
    """

    def __init__(self, name: str, failures: Failures, niceness: int = 0) -> None:
        self._failures = failures
        self._niceness = niceness
        self._changed = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._afterwards: collections.deque[Callable[[], None]] = collections.deque()
        self._next: Callable[[], None] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Start ``work``. RuntimeError while other work is running."""
        with self._changed:
            if self._work is not None or self._stopping:
                raise RuntimeError(f"{self._thread.name} is busy or stopped")
            self._work = work
            self._changed.notify_all()

    def submit_next(self, work: Callable[[], None]) -> None:
        """Start ``work``, or run it once after the running work, for any number of calls.

        RuntimeError when the thread was stopped.
        """
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self._thread.name} is stopped")
            if self._work is None:
                self._work = work
            else:
                self._next = work
            self._changed.notify_all()

    def submit_after(self, work: Callable[[], None]) -> None:
        """Run ``work`` after the running work, before the thread is idle; at once if it is idle.

        Each call's work is run. RuntimeError when the thread was stopped.
        """
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self._thread.name} is stopped")
            self._afterwards.append(work)
            if self._work is None:
                self._take_next()

    def _take_next(self) -> None:
        """Begin with the work that comes next, or be idle. The caller holds ``_changed``."""
        if self._afterwards:
            self._work = self._afterwards.popleft()
        else:
            self._work, self._next = self._next, None
        self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no work is running; return False when that takes longer than ``timeout_s``."""
        with self._changed:
            return wait_for(self._changed, lambda: self._work is None, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Let running work end, then end the thread; return False when it did not in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return join(self._thread, timeout_s)

    def _loop(self) -> None:
        self._lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._stopping)
                work = self._work
            if work is None:
                return
            try:
                work()
            # Recorded, raised by check_for_errors. An exit in a user's policy would end the thread.
            except BaseException as error:  # noqa: BLE001
                text = unexpected_text(error)
                self._failures.record(SaveFailed("run", self._thread.name, text), cause=error)
            finally:
                # Drop the last reference to the snapshot first, so that its buffers are freed.
                del work
                with self._changed:
                    self._take_next()

    def _lower_priority(self) -> None:
        if not self._niceness:
            return
        try:
            # Linux keeps a priority per thread and accepts its id in place of a process's.
            me = threading.get_native_id()
            lower = os.getpriority(os.PRIO_PROCESS, me) + self._niceness
            os.setpriority(os.PRIO_PROCESS, me, min(lower, _LOWEST_PRIORITY))
        except OSError as error:  # a sandbox may forbid it, and the work must still run
            logging.warning("%s keeps the priority of training: %s", self._thread.name, error)


def off_training_thread(users_code: Callable[[], _T]) -> _T:
    """Return the result of code of the user's, which this thread calls in the background.

    RuntimeError: it has called ``sys.exit``. Python ignores that exit in a thread, which would end
    without a word, and with the thread the work of the checkpointer. See also ``EventSink``.
    """
    try:
        return users_code()
    except SystemExit as error:
        raise RuntimeError(f"it has called sys.exit({error.code!r}) in the background") from error


def run_in_thread(name: str, work: Callable[[], None]) -> Future[None]:
    """Run ``work`` once in a new thread; ``result`` waits for it and raises its error."""
    pool = ThreadPoolExecutor(1, name)
    started = pool.submit(work)
    pool.shutdown(wait=False)
    return started


def chain(*parts: Callable[[], object]) -> Callable[[], None]:
    """Return one piece of work that runs ``parts`` in order; an error ends it."""

    def work() -> None:
        for part in parts:
            part()

    return work


def closing(resource: Closeable, work: Callable[[], object]) -> Callable[[], None]:
    """Return ``work`` followed, in any case, by closing ``resource``."""

    def work_and_close() -> None:
        with contextlib.closing(resource):
            work()

    return work_and_close


class FinalCalls:
    """Calls of finalisers, one after the other, in a thread of their own.

    A finaliser runs in a thread that may have any lock, so it may neither wait nor start a thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. A forked child has none of its parent's threads."""
        if self._thread is None or not self._thread.is_alive():
            self._calls = queue.SimpleQueue()  # the parent's may be locked for ever
            work = functools.partial(_call_all, self._calls)
            self._thread = threading.Thread(target=work, name="eckpt-final", daemon=True)
            self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Make ``call`` soon; an error is logged. For finalisers."""
        self._calls.put(call)  # reentrant, as documented

    def wait(self, timeout_s: float) -> bool:
        """Wait for the calls that were put before; return whether all have been made."""
        made = SignalFlag()
        self._calls.put(made.set)
        return made.wait(timeout_s)


def _call_all(calls: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        call = calls.get()
        try:
            call()
        except Exception:  # noqa: BLE001 - the others must be called in any case
            logging.exception("in the end of an object that nothing refers to")
        del call


_at_end: collections.deque[tuple[threading.Thread, Callable[[], object]]] = collections.deque()


def at_program_end(call: Callable[[], object]) -> None:
    """Call ``call`` when the main thread and this one have ended; the last one first.

    Threads and pools still take work then. Functions of ``atexit`` run after the interpreter has
    ended all pools of ``concurrent.futures``, with which clients of storage read and write. An
    error is logged. A daemon thread, and one of a pool, is not waited for.
    """
    _at_end.append((threading.current_thread(), call))


def not_at_program_end(call: Callable[[], object]) -> None:
    """Do not call ``call`` at the end. Nothing happens if nobody asked for the call."""
    for entry in [entry for entry in _at_end if entry[1] == call]:
        _at_end.remove(entry)


def _end_program() -> None:
    for thread, _ in list(_at_end):
        # Who trains in a thread may let the main one end. Pools end their threads after this.
        if not thread.daemon and thread not in _threads_of_pools:
            while thread is not threading.main_thread() and thread.is_alive():
                thread.join(_PIECE_S)
    while _at_end:
        _, call = _at_end.pop()
        try:
            call()
        except Exception:  # noqa: BLE001 - the others must be called in any case
            logging.exception("at the end of the program")


_threads_of_pools: Container[threading.Thread] = getattr(pools, "_threads_queues", ())

# The standard library's own way, since 3.9: what was registered last, after its pools, is called
# first. Without it saves that need a pool fail at the end, with an error.
getattr(threading, "_register_atexit", atexit.register)(_end_program)


_FASTEST_LINK_GB_S = 60.0
"""More than a device's link moves today: PCIe 5 gives 55."""
_LEAST = 2
_CORES_OF_ONE = 4
"""Training, its data and other processes of the host have the other cores."""


def threads_for(cores: int, one_gb_s: Callable[[], float]) -> int:
    """Return a quarter of the cores, but 2 at least, and no more than the link can use.

    ``one_gb_s``: gives what one thread does; asked where that may matter.
    """
    threads = max(_LEAST, cores // _CORES_OF_ONE)
    if threads > _LEAST:
        threads = max(_LEAST, min(threads, math.ceil(_FASTEST_LINK_GB_S / one_gb_s())))
    return min(threads, cores)
