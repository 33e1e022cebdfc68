"""What the tests of the launcher share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from emergency_ckpt.launch.job import JobSpec

MakeSpec = Callable[..., JobSpec]

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Block until ``condition`` holds; fail after ``DEADLINE_S``."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.01)


def state(pid: int) -> str:
    """A process's state as the kernel has it: T for stopped, Z for a zombie, X for gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    """Whether a process runs: zombies do not."""
    return state(pid) not in "ZX"


def wait_until_gone(pids: Iterable[int]) -> None:
    """Block until none of ``pids`` runs; fail after ``DEADLINE_S``."""
    for pid in pids:
        wait_until(lambda pid=pid: not alive(pid), f"process {pid} is gone")
