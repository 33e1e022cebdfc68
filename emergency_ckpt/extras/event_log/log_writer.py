"""``EventLog``: writes the events of one process in a thread of its own; and its observer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import queue
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from absl import logging

from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extras.event_log.records import LAUNCHER_FILE, LoggedEvent, encode_line, logged
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.observer import JobView, Observer

LOG_VARIABLE: Final = "ECKPT_EVENT_LOG"
"""Variable with the directory that ``eckpt launch`` gives to the processes that it starts."""
MAX_WAITING: Final = 16384
"""Events that wait for the writer thread; more are dropped and counted."""

LOG_BYTES: Final = 256 << 20
"""Maximum size of the event log of a process; the oldest events are removed first."""
_LIFE_VARIABLE: Final = "ECKPT_RESTART_COUNT"
_BATCH: Final = 256
_RETRY_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 5.0

FILES_KEPT: Final = 4
"""Files of one writer; together they hold its limit of bytes."""

_MAX_TWINS: Final = 8
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

_opening = threading.Lock()
_open: dict[tuple[Path, int | None], EventLog] = {}


def open_event_log(
    directory: Path, process: int | None, *, limit_bytes: int = LOG_BYTES, life: int = 0
) -> EventLog:
    """Return the log of ``process`` in ``directory``; None is the launcher. Does not block.

    Several users in one program share one writer: each calls ``close``. Nothing is written and no
    error is raised here.
    """
    key = (directory.absolute(), process)
    with _opening:
        log = _open.get(key)
        if log is None:
            log = _open[key] = EventLog(*key, limit_bytes=limit_bytes, life=life)
        log.users += 1
        return log


class EventLog:
    """Writes events in the background. Any thread may call it. Made by ``open_event_log``."""

    def __init__(
        self, directory: Path, process: int | None, *, limit_bytes: int, life: int
    ) -> None:
        self.users = 0
        self._key = (directory, process)
        self._process = process
        self._life = life
        stem = LAUNCHER_FILE if process is None else f"events_{process:05d}"
        self._files = LogFiles(directory, stem, limit_bytes)
        self._waiting: queue.SimpleQueue[LoggedEvent | None] = queue.SimpleQueue()
        self._drops = threading.Lock()
        self._dropped = 0  # by those who emit
        self._lost = 0  # by the writer, and what it has learnt of ``_dropped``
        self._retry_at_s = 0.0
        self._was_told = False
        self._is_off = False
        self._thread = threading.Thread(target=self._loop, name="eckpt-event-log", daemon=True)
        self._thread.start()
        drop_in_child(self, EventLog._forget)

    def __call__(self, event: Event) -> None:
        """Append ``event``; never blocks or raises."""
        self._put(logged(event, self._life))

    def note(self, name: str, fields: Mapping[str, Any], **place: Any) -> None:
        """Append an event of the program itself, as ``train.step``; never blocks or raises.

        ``place``: other attributes of ``LoggedEvent``, instead of now, this process and its life.
        """
        at: dict[str, Any] = {
            "time_s": time.time(),
            "process": self._process,
            "life": self._life,
            **place,
        }
        self._put(LoggedEvent(name=name, fields=dict(fields), **at))

    def close(self) -> None:
        """Write what waits, after the last user's call. Blocks for a silent file system, 5 s."""
        with _opening:
            self.users -= 1
            if self.users or self._is_off:
                return
            _open.pop(self._key, None)
            self._is_off = True
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logging.warning(
                "event log %s: its file system is silent; its end is lost", self._key[0]
            )

    def _put(self, event: LoggedEvent) -> None:
        if self._is_off:
            return
        if self._waiting.qsize() >= MAX_WAITING:
            with self._drops:
                self._dropped += 1
            return
        self._waiting.put(event)

    def _forget(self) -> None:
        """In a forked child, which has no writer thread; the lock is the parent's."""
        self._is_off = True
        _open.pop(self._key, None)
        self._files.close()

    def _loop(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < _BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            self._write([event for event in batch if event is not None])
            if None in batch:
                self._files.close()
                return

    def _write(self, events: list[LoggedEvent]) -> None:
        if not events:
            return
        with self._drops:
            self._lost, self._dropped = self._lost + self._dropped, 0
        if time.monotonic() < self._retry_at_s:
            self._lost += len(events)
            return
        if self._lost:
            fields = {"count": self._lost}
            loss = msgspec.structs.replace(events[0], name="log.lost", fields=fields)
            lines = [loss, *events]
        else:
            lines = events
        try:
            self._files.append(b"".join(map(encode_line, lines)))
        except Exception as error:  # noqa: BLE001 - the log must not end training, nor itself
            self._lost += len(events)
            self._retry_at_s = time.monotonic() + _RETRY_S
            if not self._was_told:
                self._was_told = True
                text = "event log %s cannot be written; events are dropped meanwhile: %s"
                logging.warning(text, self._key[0], error)
        else:
            self._lost = 0


class EventLogObserver(Observer):
    """Keeps the events of this process in ``directory``: a value of ``on_event``.

    Raises:
      ConfigError: ``directory`` is no absolute path.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        if not self._directory.is_absolute():
            raise ConfigError([f"event log {str(directory)!r} is not an absolute path"])
        self._logs: list[EventLog] = []

    def begin(self, process_index: int) -> None:
        """Open the log of this process."""
        restarts = os.environ.get(_LIFE_VARIABLE, "")
        is_number = restarts.isascii() and restarts.isdigit() and len(restarts) < 9
        life = int(restarts) if is_number else 0
        self._logs.append(open_event_log(self._directory, process_index, life=life))

    def join(self, job: JobView) -> None:
        """Keep each step that the loop names on record: the event ``train.step``."""
        log, events = self._logs[-1], job.events
        job.progress.watch(lambda step: log(events.made("train.step", step=int(step))))

    def __call__(self, event: Event) -> None:
        """Append ``event``; never blocks or raises."""
        if self._logs:
            self._logs[-1](event)

    def close(self) -> None:
        """Write what waits. Blocks for a silent file system, 5 s."""
        if self._logs:
            self._logs.pop().close()


def from_text(argument: str) -> EventLogObserver:
    """Return the log of the text ``"event_log(<directory>)"``.

    Without a directory it is that of the variable ECKPT_EVENT_LOG, which ``eckpt launch`` sets.

    Raises:
      ConfigError: there is no directory, or it is no absolute path.
    """
    directory = argument or os.environ.get(LOG_VARIABLE, "")
    if not directory:
        example = "event_log(/logs/run7)"
        problem = f"the observer event_log has no directory: name one, as in {example!r}, or set"
        raise ConfigError([f"{problem} {LOG_VARIABLE}"])
    return EventLogObserver(directory)


class LogFiles:
    """Appends whole lines to ``<directory>/<stem>.jsonl``. For one thread; OSError on failure.

    A failed call leaves the file closed; the next one opens it again, makes a missing directory,
    and ends a line that was cut short.
    """

    def __init__(self, directory: Path, stem: str, limit_bytes: int) -> None:
        self._directory = directory
        self._stem = stem
        self._file_bytes = max(1, limit_bytes // FILES_KEPT)
        self._descriptor: int | None = None
        self._path = directory / f"{stem}.jsonl"
        self._size_bytes = 0

    def append(self, lines: bytes) -> None:
        """Write ``lines``, which end with a line end, to the file, or to the next one if full."""
        try:
            if self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0:
                self._open()
            if self._size_bytes and self._size_bytes + len(lines) > self._file_bytes:
                self._rotate()
            self._write(lines)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> None:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MAX_TWINS + 1):
            name = self._stem if number == 1 else f"{self._stem}-{number}"
            self._path = self._directory / f"{name}.jsonl"
            self._descriptor = descriptor = _locked(self._path)
            if descriptor is not None:
                break
        else:
            raise OSError(errno.EBUSY, f"{_MAX_TWINS} programs write there", str(self._path))
        self._size_bytes = os.fstat(descriptor).st_size
        if self._size_bytes and os.pread(descriptor, 1, self._size_bytes - 1) != b"\n":
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None, "the caller has opened it"
        left = memoryview(data)
        while left:
            count = os.write(self._descriptor, left)
            self._size_bytes += count
            left = left[count:]

    def _rotate(self) -> None:
        stem = self._path.name.removesuffix(".jsonl")
        names = [self._path, *(self._directory / f"{stem}.{n}.jsonl" for n in range(1, FILES_KEPT))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        self._open()


def _locked(path: Path) -> int | None:
    """Return a descriptor of the file, created if missing; None when another program writes it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EEXIST, "not a regular file", str(path))
        # Another program may have moved the file away since it was opened.
        if _lock(descriptor) and os.path.samestat(
            os.fstat(descriptor), os.stat(path, follow_symlinks=False)
        ):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in _NO_LOCKS  # a file system without locks: one writer is assumed
    return True
