"""Calls to storage with a deadline, and with retries after temporary errors.

Clients of object stores retry on their own, for half a minute or for ever, and some wait for ever
on a silent connection. So each call runs in its own thread, and the caller continues at the
deadline. A call of TensorStore is a future, for which no thread waits without a deadline.
"""

from __future__ import annotations

import errno
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from absl import logging

from emergency_ckpt.errors import CheckpointError, CorruptData, DeadlineExceeded
from emergency_ckpt.work_progress import WorkProgress

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
THREAD_NAME = "eckpt-storage-"
"""The beginning of the name of each thread that runs a call."""

_T = TypeVar("_T")

_CLIENTS = frozenset({"orbax", "fsspec", "gcsfs"})
_numbers = itertools.count()

# Codes of TensorStore, which are anywhere in the text of a ValueError.
_FINAL_CODES = re.compile(
    r"\b(NOT_FOUND|INVALID_ARGUMENT|FAILED_PRECONDITION|PERMISSION_DENIED|UNAUTHENTICATED"
    r"|DATA_LOSS|OUT_OF_RANGE|UNIMPLEMENTED)\b"
)
_PASSING_CODES = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|INTERNAL|UNKNOWN)\b"
)
# TensorStore's words for bytes that it cannot decode, most of them without a code.
_DAMAGE = re.compile(
    r"\bDATA_LOSS\b|\bError decoding\b|[Dd]ecompress\w*\(\) failed|checksum verification failed"
)
_NETWORK_CLIENTS = frozenset({"aiohttp", "google", "requests", "urllib3"})
# Errors of a file system that last until a person acts.
_FINAL_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,  # a mount point, say
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EISDIR,
        errno.ELOOP,
        errno.EMLINK,
        errno.ENAMETOOLONG,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EROFS,
        errno.EXDEV,
    }
)
# Faults of the path to the directory, which do not show what is in the directory.
_PATH_ERRNOS = frozenset({errno.EBUSY, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
# TensorStore's code for a full disk, RESOURCE_EXHAUSTED, is also that of an overloaded server.
_OS_ERROR = re.compile(r"\bos_error_code='?(\d{1,9})\b")
_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 410, 412, 416})
_FINAL_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    # Bugs. A KeyError or ValueError may be a client's report of a damaged answer.
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
)
NOT_IN_TIME = "storage did not deliver in time"
READ_AGAIN = "a second read of it was good: storage or the network has damaged an answer"
_POLL_S = (0.0005, 0.02)


def is_passing(error: BaseException) -> bool:
    """Return True when the same call may succeed later: overload, resets, silence.

    Retries would hide other errors until the deadline: refusal, absence, damage, full disks, bugs.
    """
    if isinstance(error, CheckpointError):
        return error.retryable
    if is_damage(error):
        return False
    if isinstance(error, _FINAL_ERRORS) or errno_of(error) in _FINAL_ERRNOS:
        return False
    status = _status_of(error)
    if status is not None:
        return status not in _FINAL_STATUS
    return not is_refusal(error) and _FINAL_CODES.search(str(error)) is None


def is_damage(error: BaseException) -> bool:
    """Return True when TensorStore was given bytes that it cannot decode."""
    return isinstance(error, ValueError) and _DAMAGE.search(str(error)) is not None


def is_refusal(error: BaseException) -> bool:
    """Return True when storage refused the credentials."""
    text = str(error)
    return (
        isinstance(error, PermissionError)
        or _status_of(error) in (401, 403)
        # gcsfs turns both into a plain OSError.
        or (isinstance(error, OSError) and text.startswith("Forbidden"))
        or "PERMISSION_DENIED" in text
        or "UNAUTHENTICATED" in text
    )


def is_conflict(error: BaseException) -> bool:
    """Return True when the objects in a bucket do not permit the change, or are gone."""
    return isinstance(error, FileNotFoundError | FileExistsError) or _status_of(error) in (409, 412)


def is_unreachable(error: BaseException) -> bool:
    """Return True when storage did not answer or refused, also because of the path.

    The contents of storage are then not known. False for absence and for invalid answers.
    """
    if isinstance(error, CheckpointError):
        return isinstance(error, DeadlineExceeded)
    # An error of this process, as where no thread can be started, says nothing about storage.
    is_own = isinstance(error, MemoryError | RuntimeError)
    is_of_path = errno_of(error) in _PATH_ERRNOS or "Invalid path" in str(error)
    if is_own or is_of_path or is_refusal(error):
        return True
    is_final = isinstance(error, _FINAL_ERRORS) or errno_of(error) in _FINAL_ERRNOS
    if is_final or is_damage(error):
        return False
    status = _status_of(error)
    if status is not None:
        return status not in _FINAL_STATUS
    if isinstance(error, OSError) or _PASSING_CODES.search(str(error)) is not None:
        return True
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return not modules.isdisjoint(_NETWORK_CLIENTS)


def errno_of(error: BaseException) -> int | None:
    """Return the system's error number, for TensorStore's errors from their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error of gcsfs or google-cloud-storage, or None."""
    code = getattr(error, "code", None)
    try:
        return int(code) if isinstance(code, int | str) else None
    except ValueError:
        return None


class StorageTimeout(DeadlineExceeded):
    """The call did not end before the deadline. ``thread``: the thread in which it may continue."""

    def __init__(self, target: str, thread: threading.Thread, progress: WorkProgress) -> None:
        error = progress.error("use storage at", target, "no answer in time")
        super().__init__(error.operation, target, error.problem)
        self.thread = thread


def call(
    target: str, work: Callable[[], _T], *, progress: WorkProgress, again_after_s: float = math.inf
) -> _T:
    """Return the result of ``work``; StorageTimeout when nothing moves any more.

    After a timeout ``work`` continues in its thread, which does not delay the process's exit.
    ``again_after_s``: begin ``work`` a second time after so many seconds, and return the first
    outcome; for small reads, which take so long only in a stall.
    """
    outcome: list[tuple[bool, object]] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            outcome.append((False, error))
        finally:
            done.set()

    def start() -> threading.Thread:
        name = f"{THREAD_NAME}{next(_numbers)}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    thread = start()
    if again_after_s < progress.left_s and not done.wait(again_after_s):
        logging.info("%s is read once more: no answer in %.0f s", target, again_after_s)
        start()
    while not done.wait(progress.left_s):
        if time.monotonic() >= progress.deadline_s:
            release_workers()
            raise StorageTimeout(target, thread, progress)
    good, value = outcome[0]
    if good:
        return value  # pyright: ignore[reportReturnType]
    assert isinstance(value, BaseException)
    raise value


def release_workers() -> None:
    """Exclude the workers of timed-out calls from the threads that the interpreter joins at exit.

    The interpreter joins all workers of thread pools (``concurrent.futures.thread``), even daemons,
    and a client may block a worker for half an hour.
    """
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.daemon and _serves_storage(frame):
            thread.join = _no_join
    frames.clear()  # it has this frame, and frames that keep the snapshot of a save


def _serves_storage(frame: FrameType | None) -> bool:
    """Return True when a thread is a pool's worker that runs code of a storage client."""
    modules: set[str] = set()
    while frame is not None:
        modules.add(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    is_worker = "concurrent.futures.thread" in modules
    return is_worker and not _CLIENTS.isdisjoint(name.partition(".")[0] for name in modules)


def _no_join(timeout: float | None = None) -> None:
    del timeout


def call_with_retries(
    target: str, work: Callable[[], _T], *, deadline_s: float, again_after_s: float = math.inf
) -> _T:
    """Return the result of ``work``, which is retried with growing pauses on temporary errors.

    ``work`` must be safe to repeat. The last error is raised at the deadline.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            progress = WorkProgress.until(deadline_s)
            return call(target, work, progress=progress, again_after_s=again_after_s)
        except Exception as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= pause_s or not is_passing(error):
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def read_twice(read: Callable[[], _T]) -> _T:
    """Return the result of ``read``, which is called once more after CorruptData.

    Storage has one copy of a step, and an answer may be damaged on the way: only a second damaged
    answer shows that the copy itself is damaged.
    """
    try:
        return read()
    except CorruptData as error:
        first = error
    second = read()
    logging.warning("%s; %s", first, READ_AGAIN)
    return second


class LateChanges:
    """Timed-out calls that may still change a step, by directory and step. Thread-safe.

    A client continues after the timeout, for half a minute or for ever. A late change must not
    affect a later save of the step: a removal would delete the arrays, a marker would make the save
    count too soon. So this process changes a step only when all such calls on the step have ended.
    Requests of another process end with that process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], list[threading.Thread]] = {}

    def note(self, directory: str, step: int, call: threading.Thread) -> None:
        """Record the timed-out ``call``, which may change ``step`` while it is alive."""
        with self._lock:
            for key, calls in list(self._calls.items()):
                if not any(earlier.is_alive() for earlier in calls):
                    del self._calls[key]
            self._calls.setdefault((directory, step), []).append(call)

    def wait(self, directory: str, step: int, deadline_s: float) -> None:
        """Block until all calls on ``step`` have ended; DeadlineExceeded at ``deadline_s``."""
        for call in self._under_way(directory, step):
            call.join(max(0.0, deadline_s - time.monotonic()))
        if self.under_way(directory, step):
            problem = "an earlier call that changes this step has timed out and not ended"
            raise DeadlineExceeded("use storage at", f"{directory}/{step}", problem)

    def under_way(self, directory: str, step: int) -> bool:
        """Return True when a call on ``step`` has not ended. Does not block."""
        return bool(self._under_way(directory, step))

    def _under_way(self, directory: str, step: int) -> list[threading.Thread]:
        with self._lock:
            calls = self._calls.get((directory, step), ())
            return [call for call in calls if call.is_alive()]


LATE_CHANGES = LateChanges()


def result_by(progress: WorkProgress, future: Any, item: str) -> Any:
    """Return the result of a read of TensorStore, and note the read as progress. Blocks.

    DeadlineExceeded when nothing moves any more. The deadline is a must, as in ``wait_for``.
    """
    while True:
        try:
            result = future.result(timeout=progress.left_s)
        except TimeoutError as error:
            if time.monotonic() < progress.deadline_s:
                continue
            future.cancel()
            raise progress.error("read", item, NOT_IN_TIME) from error
        progress.touch()
        return result


def wait_for(future: Any, is_over: Callable[[], bool] = lambda: False) -> None:
    """Block until TensorStore's ``future`` is done, or ``is_over`` returns True.

    A daemon thread that is blocked in TensorStore at interpreter exit aborts the process as soon as
    storage answers. So this function polls the future.
    """
    pause_s, longest_s = _POLL_S
    while not future.done() and not is_over():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def result_of(future: Any) -> Any:
    """Return the result of TensorStore's ``future``. Blocks, for as long as storage does."""
    wait_for(future)
    return future.result()
