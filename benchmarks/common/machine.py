"""Facts about the machine and the software, recorded with the figures."""

import importlib.metadata
import mmap
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT

_PACKAGES = ("emergency-ckpt", "orbax-checkpoint", "jax", "jaxlib", "tensorstore", "numpy")
_PREFIXES = ("XLA_", "JAX_", "OMP_", "MALLOC_", "GLIBC_")
IDLE_LOAD = 0.5
"""Load average over the last minute above which figures should not be published."""


def facts() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        "load_average_at_start": os.getloadavg()[0],
    }


def _commit() -> str | None:
    """Return the commit of the checkout, marked if files changed; None without a commit."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def text(about: Mapping[str, Any]) -> str:
    """Return the machine of ``facts`` in words."""
    return f"{about['cores']} cores, {about['cpu']}, {about['memory']}"


def available_memory_bytes() -> int:
    """Return the memory that the kernel could give to new processes without swapping."""
    return int(_field("/proc/meminfo", "MemAvailable").removesuffix("kB")) * 1024


def touch_free_memory(size_bytes: int) -> None:
    """Take free memory, at most half of all free memory, touch its pages, and give the pages back.

    A virtual machine may have returned free memory to its host. The host then has to find a page
    again at the first touch: on machine B a GiB took 2.4 s, and 0.13 s where the pages were there.
    Without this call the first process to take the memory would pay for all later processes.
    """
    size_bytes = min(size_bytes, available_memory_bytes() // 2) // mmap.PAGESIZE * mmap.PAGESIZE
    if size_bytes == 0:
        return
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(size_bytes // mmap.PAGESIZE)


def _field(path: str, name: str) -> str:
    """Return the value of the first ``name: value`` line, or ``unknown`` without one."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "run from its sources"
