"""``EventLog``: writes the events of one process in a thread of its own.

Its file is followed by the next when full.
"""

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

from absl import logging

from emergency_ckpt.events import Event
from emergency_ckpt.extras.event_log.records import LAUNCHER_FILE, LoggedEvent, encode_line, logged
from emergency_ckpt.forked import drop_in_child

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

_opening = threading.Lock()
_open: dict[tuple[Path, int | None], EventLog] = {}
FILES_KEPT = 4
"""Files of one writer; together they hold its limit of bytes."""

_MAX_TWINS = 8
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})


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


def life_of(environ: Mapping[str, str]) -> int:
    """Return the number of restarts by ``eckpt launch``; 0 without it."""
    text = environ.get(_LIFE_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0


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
        loss = [_lost_before(events[0], self._lost)] if self._lost else []
        try:
            self._files.append(b"".join(map(encode_line, [*loss, *events])))
        except Exception as error:  # noqa: BLE001 - the log must not end training, nor itself
            self._lost += len(events)
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._tell(error)
        else:
            self._lost = 0

    def _tell(self, error: Exception) -> None:
        if not self._was_told:
            self._was_told = True
            logging.warning(
                "event log %s cannot be written; events are dropped meanwhile: %s",
                self._key[0],
                error,
            )


def _lost_before(event: LoggedEvent, count: int) -> LoggedEvent:
    return LoggedEvent(
        time_s=event.time_s,
        name="log.lost",
        process=event.process,
        slice=event.slice,
        run_id=event.run_id,
        incarnation=event.incarnation,
        fields={"count": count},
        life=event.life,
    )


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
        if _lock(descriptor) and _is_at(descriptor, path):
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


def _is_at(descriptor: int, path: Path) -> bool:
    """Return False where another program has moved the file away since it was opened."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
