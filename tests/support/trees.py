"""Directories as values, to show that a program changed nothing in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def tree_of(root: Path) -> dict[str, tuple[object, ...]]:
    """Return mode, size, times of change and contents of everything below ``root``, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = os.lstat(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        key = path.relative_to(root).as_posix()
        found[key] = (status.st_mode, status.st_size, status.st_mtime_ns, digest)
    return found


def files_below(root: Path) -> tuple[int, int]:
    """Return the number of files below ``root``, and the bytes that they take, also of a tmpfs."""
    found = [path.stat() for path in root.rglob("*") if path.is_file()]
    return len(found), sum(each.st_blocks * 512 for each in found)
