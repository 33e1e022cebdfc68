"""Lines of the commands. A line of this program has escapes for what a terminal would act on."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from emergency_ckpt.core.wording import printable


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line to ``stream`` (None: the standard output). BrokenPipeError."""
    print(printable(line), file=sys.stdout if stream is None else stream)


def tell(line: str, stream: TextIO) -> None:
    """Print a line of a command that does work: at once, and nothing where the reader has left."""
    pass_on(printable(line), stream)


def pass_on(line: str, stream: TextIO) -> None:
    """Print a line of another program as it is, colours included; otherwise as ``tell``."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Also for the interpreter's end, which flushes what is left and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
