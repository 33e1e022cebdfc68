"""Facts about the machine and the software, recorded with the figures."""

import importlib.metadata
import os
import platform
import subprocess
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
        "commit": commit(ROOT),
        "versions": {name: _version(name) for name in _PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        "load_average_at_start": os.getloadavg()[0],
    }


def commit(checkout: Path) -> str | None:
    """Return the commit of ``checkout``, marked if files changed; None without a commit."""
    try:
        head = _git(checkout, "rev-parse", "--short", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} with changes" if changed else head


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def available_memory_bytes() -> int:
    """Return the memory that the kernel could give to new processes without swapping."""
    return int(_field("/proc/meminfo", "MemAvailable").removesuffix("kB")) * 1024


def require_room(ramdisk: Path, ramdisk_bytes: int, memory_bytes: int) -> None:
    """Raise ValueError unless so much fits on the ramdisk and in memory, ramdisks included."""
    stat = os.statvfs(ramdisk)
    for what, free_bytes, wanted_bytes in (
        (str(ramdisk), stat.f_bavail * stat.f_frsize, ramdisk_bytes),
        ("the memory", available_memory_bytes(), memory_bytes),
    ):
        if free_bytes < wanted_bytes:
            raise ValueError(
                f"{what} has {free_bytes >> 20} MiB left, the benchmark may take"
                f" {wanted_bytes >> 20} MiB: choose a smaller state"
            )


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
