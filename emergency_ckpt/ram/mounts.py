"""The file systems that this host has mounted, as Linux lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from emergency_ckpt.core.limits import MAX_MOUNTS_CHARS

RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
      kind: its type, such as ``"tmpfs"``.
      point: the directory where it is mounted.
      options: of the file system itself, such as ``"huge=within_size"``.
    """

    kind: str
    point: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of the option ``name``, or None when it is not set."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")), None)


def file_system_of(path: str, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system of ``path``, which need not exist; None when unknown."""
    found = mount_of(path, mounts)
    return found.kind if found else None


def mount_of(path: str, mounts: Path = _MOUNTS) -> Mount | None:
    """Return the file system of ``path``, which need not exist; None when unknown."""
    try:
        with mounts.open() as file:
            text = file.read(MAX_MOUNTS_CHARS)
    except (OSError, UnicodeDecodeError):
        return None
    real = Path(os.path.realpath(path))
    best: tuple[int, Mount] | None = None
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, file_system = left.split(), right.split()
        if not separator or len(fields) < 5 or not file_system:
            continue
        point = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4]))
        # Of two mounts at one place the later one hides the other.
        if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            options = tuple(file_system[2].split(",")) if len(file_system) > 2 else ()
            best = len(point.parts), Mount(file_system[0], str(point), options)
    return best[1] if best else None
