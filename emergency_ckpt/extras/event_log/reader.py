"""All events of a directory (``read_events``), and those that are new in it (``LogTail``)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import stat
from pathlib import Path
from typing import Final

from emergency_ckpt.core.limits import MAX_LINE_BYTES, MAX_LOG_ENTRIES, MAX_LOG_EVENTS
from emergency_ckpt.extras.event_log.records import FILE_PATTERN, LoggedEvent, decode_line

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
