"""Live processes of ``tier_process.py``, which hold locks until they are killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from places import JOBS

PROGRAM = JOBS / "tier_process.py"


@contextlib.contextmanager
def other_process(ramdisk: Path, what: str, argument: str) -> Iterator[list[str]]:
    """A live process that holds a lock; killed at the end. Yields what it printed."""
    child = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(ramdisk), what, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines: list[str] = []
    try:
        for line in child.stdout:
            lines.append(line.strip())
            if lines[-1] == "ready":
                break
        assert lines[-1:] == ["ready"]
        yield lines
    finally:
        child.kill()
        child.communicate(timeout=60)
