"""The memory that this process's container or host has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_KIB = 1024


def available_bytes(root: Path = _ROOT, groups: Path = _GROUPS) -> tuple[int, str]:
    """Return the bytes of memory that can be had, and what limits them: the host or a cgroup.

    Page cache counts as available, the files of a tmpfs do not.
    """
    left = {"the host": _host_bytes()}
    for folder in _memory_groups(root, groups):
        bytes_left = _group_bytes(folder)
        if bytes_left is not None:
            left[f"cgroup {folder}"] = bytes_left
    source = min(left, key=lambda name: left[name])
    return left[source], source


def _host_bytes() -> int:
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * _KIB
    return 0


def _memory_groups(root: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and of those above it, v2 and v1."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder


def _group_bytes(folder: Path) -> int | None:
    """Return the bytes left below a cgroup's limit, or None without one."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit_name, used_name, cache_name in names:
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
            stat = (folder / "memory.stat").read_text()
        except OSError:
            continue  # of the other version, or the root, which has no limit
        if limit.strip() == "max":
            return None
        cache = dict(line.split()[:2] for line in stat.splitlines()).get(cache_name, "0")
        return max(int(limit) - int(used) + int(cache), 0)
    return None
