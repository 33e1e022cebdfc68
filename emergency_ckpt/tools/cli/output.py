"""Lines, tables and progress of the commands. What a terminal would act on is escaped."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TextIO

from emergency_ckpt.core.wording import printable, seconds_text, size_text
from emergency_ckpt.tools.survey.places import SurveyFault

_PROGRESS_EVERY_S = 10.0


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line to ``stream`` (None: the standard output). BrokenPipeError."""
    print(printable(line), file=sys.stdout if stream is None else stream)


def tell(line: str, stream: TextIO) -> None:
    """Print a line at once, or nothing where the reader has left or a disk is full.

    For a command that works: its exit status tells the outcome, even if no line can be printed.
    """
    # No other stream is left to tell the error.
    with contextlib.suppress(OSError):
        _write(f"{printable(line)}\n", stream)


class Printer:
    """Prints lines in a thread of its own, for a command that works on while nobody reads them.

    A context manager, at whose end the lines that wait have ``end_s`` seconds. The first line that
    cannot be written is told on the standard error; later lines are tried all the same.
    """

    def __init__(self, *, limit_chars: int = 16 << 20, end_s: float = 5.0) -> None:
        """``limit_chars``: of what waits. Beyond it the oldest lines are left out, and counted."""
        self._limit_chars = limit_chars
        self._end_s = end_s
        self._changed = threading.Condition()
        self._lines: deque[tuple[str, TextIO | None]] = deque()
        self._waiting_chars = 0
        self._left_out = 0
        self._is_over = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="eckpt-printer", daemon=True)
        self.has_printed_all = True

    def __enter__(self) -> Printer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(self._end_s)
        self.has_printed_all &= not (self._has_failed or self._thread.is_alive())

    def tell(self, line: str, stream: TextIO | None) -> None:
        """Print a line of this program. Does not block."""
        self.pass_on(printable(line), stream)

    def pass_on(self, line: str, stream: TextIO | None) -> None:
        """Print a line of another program as it is, colours included. Does not block.

        ``stream``: None where the caller of this program closed it.
        """
        with self._changed:
            self._lines.append((line, stream))
            self._waiting_chars += len(line)
            while self._waiting_chars > self._limit_chars:
                self._waiting_chars -= len(self._lines.popleft()[0])
                self._left_out += 1
                self.has_printed_all = False
            self._changed.notify()

    def _run(self) -> None:
        while self._print_next():
            pass

    def _print_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_over)
            if not self._lines:
                return False
            line, stream = self._lines.popleft()
            self._waiting_chars -= len(line)
            left_out, self._left_out = self._left_out, 0
        if left_out:
            line = f"eckpt: {left_out} lines are left out here, which nobody read in time\n{line}"
        try:
            if stream is not None:
                _write(f"{line}\n", stream)
        except OSError as error:  # what this program does is worth more than its lines
            if not self._has_failed:
                tell(f"eckpt: lines cannot be printed, and are left out: {error}", sys.stderr)
            self._has_failed = True
        return True


def _write(text: str, stream: TextIO) -> None:
    # Past the stream's buffer: its lock, held by a thread that blocks, would abort the
    # interpreter's end, which flushes the stream.
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory, as of a caller in Python
        stream.write(text)
        return
    data = text.encode(stream.encoding, errors="replace")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        # Also for the interpreter's end, which flushes what is left and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their columns."""
    lines = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for row in lines:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def print_faults(faults: Sequence[SurveyFault]) -> None:
    """Print one line for each fault to the standard error."""
    for fault in faults:
        hint = f"; {fault.hint}" if fault.hint else ""
        print_line(f"{fault.where}: {fault.problem}{hint}", sys.stderr)


def known_size_text(size_bytes: int | None) -> str:
    """Return a size with a unit; ``-`` when it is not known."""
    return "-" if size_bytes is None else size_text(size_bytes)


def age_text(age_s: float | None) -> str:
    """Return a time with a unit; ``-`` when it is not known."""
    if age_s is None:
        return "-"
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if age_s >= unit_s:
            return f"{age_s / unit_s:.1f}{unit}"
    return f"{max(age_s, 0):.0f}s"


class ProgressLines:
    """Is called with the bytes that were done since the last call, of ``total_bytes``."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._begin_s = self._last_s = time.monotonic()

    def __call__(self, count: int) -> None:
        """Print a line when ten seconds have passed since the last one."""
        self._done_bytes += count
        now_s = time.monotonic()
        if now_s - self._last_s < _PROGRESS_EVERY_S:
            return
        self._last_s = now_s
        rate = self._done_bytes / (now_s - self._begin_s)
        left_s = max(self._total_bytes - self._done_bytes, 0) / max(rate, 1)
        tell(
            f"{self._what}: {size_text(self._done_bytes)} of {size_text(self._total_bytes)},"
            f" {size_text(round(rate))}/s, {seconds_text(left_s)} left",
            sys.stderr,
        )
