"""The file systems that this host has mounted, as Linux lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path

RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

_MOUNTS = Path("/proc/self/mountinfo")
_LIMIT_CHARS = 4 << 20
_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_of(path: str, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system of ``path``, which need not exist; None when unknown."""
    try:
        with mounts.open() as file:
            text = file.read(_LIMIT_CHARS)
    except (OSError, UnicodeDecodeError):
        return None
    real = Path(os.path.realpath(path))
    best: tuple[int, str] | None = None
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5 or not right.split():
            continue
        point = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4]))
        # Of two mounts at one place the later one hides the other.
        if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), right.split()[0]
    return best[1] if best else None
