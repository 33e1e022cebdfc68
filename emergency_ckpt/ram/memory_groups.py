"""The memory limits of this process's control groups, as Linux lists them.

A page of a tmpfs counts in the group of the process that touched it first. When that group is
removed, as with a step of Slurm, it still counts in the groups above: in the job's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from emergency_ckpt.core.limits import MAX_GROUP_FILE_BYTES
from emergency_ckpt.core.memory_limit import MemoryLimit, fits_limits
from emergency_ckpt.ram.mounts import RAM_FILE_SYSTEMS, file_system_of

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Limit, use, and prefix of the figures that include inner groups: of version 2, of version 1."""


def memory_limits(root: Path = _ROOT, groups: Path = _GROUPS) -> list[MemoryLimit]:
    """Return the limits of this process's memory group and of those above it, versions 1 and 2.

    A file that is missing, or that has no number, is no limit.
    """
    found = (_limit_of(folder) for folder in _memory_groups(root, groups))
    return [limit for limit in found if limit is not None]


def new_pages_fit(directory: Path, new_bytes: int) -> tuple[bool, str]:
    """Return whether so many new bytes of files in ``directory`` fit the limits, and why not.

    Files that are not in RAM count in none.
    """
    in_ram = file_system_of(str(directory)) in RAM_FILE_SYSTEMS
    return fits_limits(new_bytes, memory_limits() if in_ram else [])


def _memory_groups(root: Path, groups: Path) -> Iterator[Path]:
    for line in _text(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder


def _limit_of(folder: Path) -> MemoryLimit | None:
    for limit_name, used_name, prefix in _FILES:
        limit_bytes, used_bytes = (_number(_text(folder / n)) for n in (limit_name, used_name))
        if limit_bytes is None or used_bytes is None:
            continue  # of the other version, or without a limit
        pairs = (line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines())
        stat = {pair[0]: _number(pair[1]) or 0 for pair in pairs if len(pair) == 2}
        cache_bytes = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        return MemoryLimit(f"cgroup {folder}", limit_bytes, used_bytes, cache_bytes)
    return None


def _number(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None


def _text(path: Path) -> str:
    """Return a file's text up to the bound; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_GROUP_FILE_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
