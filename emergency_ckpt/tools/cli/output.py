"""Lines of the commands. A line of this program has escapes for what a terminal would act on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Generator
from typing import TextIO

from emergency_ckpt.core.wording import printable


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line to ``stream`` (None: the standard output). BrokenPipeError."""
    print(printable(line), file=sys.stdout if stream is None else stream)


def tell(line: str, stream: TextIO) -> None:
    """Print a line of a command that does work: at once, and nothing where the reader has left."""
    with _until_the_reader_leaves(stream):
        print(printable(line), file=stream, flush=True)


def tell_last(line: str, stream: TextIO) -> None:
    """Print a line as ``tell`` does, and nothing where the stream takes no more, as a full disk.

    For a command whose exit status tells the outcome of its work, even if no line can be printed.
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
                tell_last(f"eckpt: lines cannot be printed, and are left out: {error}", sys.stderr)
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
    with _until_the_reader_leaves(stream):
        while data:
            data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _until_the_reader_leaves(stream: TextIO) -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        # Also for the interpreter's end, which flushes what is left and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
