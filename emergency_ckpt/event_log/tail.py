"""``LogTail``: new events of a directory, as processes append them."""

from __future__ import annotations

import os
from pathlib import Path

from emergency_ckpt.event_log.records import FILE_PATTERN, LoggedEvent, decode_line


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
            events.extend(_decode_lines(whole))
        return sorted(events, key=lambda event: event.time_s)


def _decode_lines(block: bytes) -> list[LoggedEvent]:
    events: list[LoggedEvent] = []
    for line in block.split(b"\n"):
        try:
            events.append(decode_line(line))
        except ValueError:
            continue
    return events
