"""The mounted file systems of this host and the limits on its memory, as Linux lists them.

A page of a tmpfs counts in the control group of the process that touched it first. When that group
is removed, as with a step of Slurm, it still counts in the groups above: in the job's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from emergency_ckpt.core.limits import MAX_GROUP_FILE_BYTES, MAX_MOUNTS_CHARS

RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Limit, use, and prefix of the figures that include inner groups: of version 2, of version 1."""


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
    mount = mount_of(path, mounts)
    return mount.kind if mount else None


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
        mount_part, separator, type_part = line.partition(" - ")
        fields, file_system = mount_part.split(), type_part.split()
        if not separator or len(fields) < 5 or not file_system:
            continue
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of two mounts at one place the later one hides the other.
        if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            options = tuple(file_system[2].split(",")) if len(file_system) > 2 else ()
            best = len(point.parts), Mount(file_system[0], str(point), options)
    return best[1] if best else None


def memory_limits(root: Path = _ROOT, groups: Path = _GROUPS) -> list[MemoryLimit]:
    """Return the limits of this process's memory group and of those above it, versions 1 and 2.

    A file that is missing, or that has no number, is no limit.
    """
    limits = (_limit_of(folder) for folder in _memory_groups(root, groups))
    return [limit for limit in limits if limit is not None]


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


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on memory, in bytes.

    Attributes:
      name: what has it, for people.
      charged_bytes: what counts in it. Pages of a tmpfs count where they were first touched, also
        after the process has ended.
      reclaimable_bytes: page cache among that, which the kernel gives up before it kills.
    """

    name: str
    limit_bytes: int
    charged_bytes: int = 0
    reclaimable_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Return the bytes that may still be taken."""
        return max(self.limit_bytes - self.charged_bytes + self.reclaimable_bytes, 0)


def tightest(limits: Iterable[MemoryLimit]) -> MemoryLimit | None:
    """Return the limit that leaves least, or None without any."""
    return min(limits, key=lambda limit: limit.left_bytes, default=None)


def fits_limits(new_bytes: int, limits: Iterable[MemoryLimit]) -> tuple[bool, str]:
    """Return whether ``new_bytes`` of new pages fit, and why not.

    Pages that are there already, also of a process that has ended, are no new ones. Swap does not
    count: a ramdisk there is no ramdisk.
    """
    least = tightest(limits)
    if least is None or new_bytes <= least.left_bytes:
        return True, ""
    used_bytes = least.charged_bytes - least.reclaimable_bytes
    return False, (
        f"the memory limit of {least.name} is {least.limit_bytes} bytes, of which {used_bytes} are"
        f" taken: {least.left_bytes} are left for {new_bytes} bytes of new pages"
    )
