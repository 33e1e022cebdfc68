"""The record of a job: each process's events on disk, one JSON object per line.

Files of a directory:

- ``events_<process:05d>.jsonl``: the events of one process of the job, of all its lives; the
  launcher's are in ``events_launcher.jsonl``. A restart appends.
- ``events_<process:05d>.<n>.jsonl``: older ones of the same process; the higher n, the older. The
  oldest file is removed for room.
- ``events_<process:05d>-<n>.jsonl``: those of another program with the same process id that wrote
  at the same time, such as a second job with the same directory.

Each line is an object, ``{"time_s": float, "name": str, "process": int | null, "slice": int | null,
"run_id": str, "incarnation": str, "fields": {...}, "life": int}``: Unix time; the event's
name and fields as in ``docs/monitoring.md``; the process and its slice, null for the launcher; the
run and the life of the job that emitted it (those of a restore carry the incarnation before it),
empty before they are known; the number of restarts by ``eckpt launch``, 0 without it.

Guarantees: a line is whole, or the last of its file (a killed process) or before a line that
follows it after a failed write; readers skip it. A normal stop loses nothing. A killed process
loses events that its writer thread had not yet passed to the kernel: those of the last
milliseconds, at most ``MAX_WAITING``. Nothing here raises into training or keeps it
waiting: a full disk, a removed directory and a silent file server are logged once, events are
dropped meanwhile, and the event ``log.lost`` tells their number afterwards.

Not guaranteed: that a line survives a crash of the host, since nothing is synced.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from absl import logging

from emergency_ckpt.core.limits import MAX_LINE_BYTES, MAX_LOG_ENTRIES, MAX_LOG_EVENTS, MAX_TIME_S
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event, point_of
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.json_decoders import decoder_of
from emergency_ckpt.observer import JobView, Observer

__all__ = [
    "EventHistory",
    "EventLog",
    "EventLogObserver",
    "LogTail",
    "LoggedEvent",
    "decode_line",
    "encode_line",
    "from_text",
    "open_event_log",
    "read_events",
]


LAUNCHER_FILE: Final = "events_launcher"
FILE_PATTERN: Final = re.compile(r"events_(?:\d{5,9}|launcher)(?:-\d+)?(?:\.\d+)?\.jsonl")

_MAX_CLIPPED_FIELDS: Final = 32
_CLIPPED_CHARS: Final = 500
_WORD: Final = 1 << 63

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Id = Annotated[str, msgspec.Meta(max_length=400)]


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line.

    Attributes:
      time_s: Unix time.
      name, fields: of the event; ``fields`` has JSON values.
      process, slice: the emitting process and its slice; None for the launcher.
      run_id, incarnation: of the emitting checkpointer; empty before they are known.
      life: number of restarts by ``eckpt launch`` before this; 0 without it.
    """

    time_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
    name: _Name
    process: _Index | None = None
    slice: _Index | None = None
    run_id: _Id = ""
    incarnation: _Id = ""
    fields: dict[str, Any] = {}
    life: _Index = 0

    @property
    def point(self) -> str:
        """Return the name, with the stage or the cause if there is one, as ``Event.point``."""
        return point_of(self.name, self.fields)


def logged(event: Event, life: int = 0) -> LoggedEvent:
    """Return the line of ``event``; ``process`` is not repeated in its fields."""
    origin = event.origin
    fields = {key: value for key, value in event.fields.items() if key != "process"}
    return LoggedEvent(
        time_s=event.time_s,
        name=event.name,
        process=origin.process_index,
        slice=origin.slice_index,
        run_id=origin.run_id,
        incarnation=origin.incarnation,
        fields=fields,
        life=life,
    )


def encode_line(event: LoggedEvent) -> bytes:
    """Return one line, of at most ``MAX_LINE_BYTES``.

    Values that JSON does not have become text; fields that are too long are cut.
    """
    try:
        line = _ENCODER.encode(event) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            return line
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass  # a surrogate, an integer beyond 64 bits, a key that is no text, a cycle
    first = list(event.fields.items())[:_MAX_CLIPPED_FIELDS]
    clipped = {ascii(key)[1:-1][:100]: _clipped_value(value) for key, value in first}
    return _ENCODER.encode(msgspec.structs.replace(event, fields=clipped)) + b"\n"


def decode_line(line: bytes) -> LoggedEvent:
    """Return the event in ``line``. Raises ValueError for anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"decode event: {len(line)} bytes in a line, over {MAX_LINE_BYTES}")
    try:
        return _DECODER.decode(line)
    except RecursionError as error:
        raise ValueError("decode event: too deeply nested") from error
    # msgspec's errors and UnicodeDecodeError are ValueErrors.


def _clipped_value(value: object) -> object:
    is_short_int = type(value) is int and -_WORD < value < _WORD
    if value is None or isinstance(value, bool | float) or is_short_int:
        return value
    return _as_text(value)[:_CLIPPED_CHARS]


def _as_text(value: object) -> str:
    try:
        return ascii(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ must not end the log
        return f"<{type(value).__name__}: {type(error).__name__}>"


_ENCODER = msgspec.json.Encoder(enc_hook=_as_text)
_DECODER = decoder_of(LoggedEvent)


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


_DEFAULT_BYTES: Final = 256 << 20
_MAX_NAMED: Final = 20
_REASON_CHARS: Final = 200


@dataclasses.dataclass(frozen=True)
class EventHistory:
    """The events of a directory.

    Attributes:
      events: by time; those of one file with equal times in their order there.
      files: number of files that were read.
      bad_lines: lines that are no events: cut short, damaged or foreign.
      damaged: file, position and fault of the first of these.
      is_cut: older events were left out, since the files are larger than the limit.
      unreadable: a line for each file that could not be read.
    """

    events: tuple[LoggedEvent, ...]
    files: int
    bad_lines: int
    is_cut: bool
    unreadable: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def read_events(
    directory: str | os.PathLike[str], limit_bytes: int = _DEFAULT_BYTES
) -> EventHistory:
    """Return the events of the log in ``directory``; also while processes append to it.

    Files of other names, links, pipes and folders are passed over. Time and memory are bounded by
    ``limit_bytes`` and a million events: of larger logs the newest part of each file is read.

    Raises:
      OSError: the directory cannot be listed.
    """
    sizes: dict[Path, int] = {}
    unreadable: list[str] = []
    with os.scandir(directory) as entries:
        for entry in itertools.islice(entries, MAX_LOG_ENTRIES):
            if FILE_PATTERN.fullmatch(entry.name) is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                unreadable.append(f"{entry.name}: {error}")
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[Path(entry.path)] = status.st_size
    events: list[LoggedEvent] = []
    damaged: list[str] = []
    bad_lines, is_cut, left_bytes = 0, False, limit_bytes
    ascending = sorted(sizes, key=lambda path: (sizes[path], path))
    for position, path in enumerate(ascending):
        files_left = len(ascending) - position
        share = (left_bytes // files_left, (MAX_LOG_EVENTS - len(events)) // files_left)
        try:
            part = _newest(path, *share)
        except OSError as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        events += part.events
        left_bytes -= part.nbytes
        bad_lines += part.bad_lines
        damaged += (f"{path.name} {fault}" for fault in part.faults)
        is_cut |= part.is_cut
    events.sort(key=lambda event: event.time_s)
    named = tuple(damaged[:_MAX_NAMED])
    return EventHistory(tuple(events), len(sizes), bad_lines, is_cut, tuple(unreadable), named)


@dataclasses.dataclass
class _Part:
    """The events at the end of one file, of which ``nbytes`` were read, and its first faults."""

    events: collections.deque[LoggedEvent]
    nbytes: int = 0
    bad_lines: int = 0
    is_cut: bool = False
    faults: list[str] = dataclasses.field(default_factory=list[str])


def _newest(path: Path, limit_bytes: int, most_events: int) -> _Part:
    part = _Part(collections.deque(maxlen=most_events))
    # O_NONBLOCK: a pipe that took the file's place must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        start = max(0, status.st_size - limit_bytes)
        if start:
            file.seek(start - 1)
            file.readline(MAX_LINE_BYTES)  # the end of the line before
            part.is_cut = True
        start = file.tell()
        while part.nbytes < limit_bytes and (line := file.readline(MAX_LINE_BYTES + 1)):
            place = start + part.nbytes
            part.nbytes += len(line)
            if line == b"\n":
                continue
            try:
                event = decode_line(line)
            except ValueError as error:
                part.bad_lines += 1
                if len(part.faults) < _MAX_NAMED:
                    words = str(error)[:_REASON_CHARS] if line.endswith(b"\n") else "half a line"
                    part.faults.append(f"at byte {place}: {words}")
                continue
            part.is_cut |= len(part.events) == most_events
            part.events.append(event)
    return part


class LogTail:
    """Reads the lines that were appended to a directory's log since the last call.

    For a log that this program's own processes write: its size in memory is that of what is new.
    Files that were put aside for room are not read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, tuple[int, int]] = {}

    def read_new(self) -> list[LoggedEvent]:
        """Return the new events by time. An unfinished line waits for the next call.

        What is no event is skipped, such as the truncated line of a killed process.
        """
        events: list[LoggedEvent] = []
        for path in sorted(self._directory.glob("events_*.jsonl")):
            if FILE_PATTERN.fullmatch(path.name) is None or path.suffixes != [".jsonl"]:
                continue
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                known, offset = self._offsets.get(path, (inode, 0))
                start = file.seek(offset if known == inode else 0)
                whole, newline, _ = file.read().rpartition(b"\n")
                self._offsets[path] = (inode, start + len(whole) + len(newline))
            for line in whole.split(b"\n"):
                with contextlib.suppress(ValueError):
                    events.append(decode_line(line))
        return sorted(events, key=lambda event: event.time_s)
