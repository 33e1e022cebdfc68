"""Changes to a directory that end after some: to who looks then, as if the process had died."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

CHANGES = frozenset(
    {"open", "os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
)


class Changes:
    """The changes that Python makes below a directory: counted, and from one on refused."""

    def __init__(self) -> None:
        self.directory = ""
        self.left = 0
        sys.addaudithook(self)  # there is no way to take it off again

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.directory or event not in CHANGES:
            return
        if event == "open" and not arguments[2] & os.O_ACCMODE:
            return
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
        if not any(path.startswith(self.directory) for path in paths):
            return
        self.left -= 1
        if self.left < 0:
            raise PermissionError("as if the process had died")

    @contextlib.contextmanager
    def end_after(self, directory: Path, changes: int) -> Generator[None]:
        self.directory, self.left = str(directory), changes
        try:
            yield
        finally:
            self.directory = ""

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Count and refuse nothing meanwhile."""
        directory, self.directory = self.directory, ""
        try:
            yield
        finally:
            self.directory = directory


CHANGED = Changes()
