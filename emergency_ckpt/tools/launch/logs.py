"""The log files of host processes: followed line by line, and their tails for error messages.

Processes write into files, not into a pipe of the supervisor. So no output is lost, and no process
blocks or gets SIGPIPE when the supervisor stops or dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from emergency_ckpt.core.limits import MAX_LINE_BYTES

LineSink = Callable[[str], None]

_READ_BYTES = 256 * 1024


class LogFollower:
    """Passes each new line of a growing file to ``sink``, with a prefix."""

    def __init__(self, path: Path, prefix: str, sink: LineSink) -> None:
        self._file = path.open("rb", buffering=0)
        self._prefix = prefix
        self._sink = sink
        self._partial = b""

    def poll(self) -> bool:
        """Pass the lines that the next part of the file completes; return whether it has one.

        Never blocks. One part a call, since a process may write faster than ``sink`` takes lines.
        """
        data = self._file.read(_READ_BYTES)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._partial) > MAX_LINE_BYTES:
            self._flush()
        return bool(data)

    def close(self) -> None:
        """Pass the rest, also a last line without a line end, and close the file."""
        end = os.fstat(self._file.fileno()).st_size  # a process that got away may still write
        while self._file.tell() < end and self.poll():
            pass
        if self._partial:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        line, self._partial = self._partial, b""
        self._emit(line)

    def _emit(self, line: bytes) -> None:
        self._sink(self._prefix + line.decode("utf-8", errors="replace").rstrip("\r"))


def log_tail(path: Path, *, lines: int = 30, limit_bytes: int = 16 * 1024) -> str:
    """Return the last ``lines`` of a log file, at most ``limit_bytes``.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - limit_bytes))
        text = file.read(limit_bytes).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
