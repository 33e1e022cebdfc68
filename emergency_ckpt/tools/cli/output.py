"""Lines of commands that do work, which goes on where nobody reads the lines."""

from __future__ import annotations

import os
from typing import TextIO


def tell(line: str, stream: TextIO) -> None:
    """Print ``line`` at once; nothing where the reader of ``stream`` has left, as ``head`` does."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        # Also for the interpreter's end, which flushes what is left and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
