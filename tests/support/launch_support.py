"""What the tests of the launcher share."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.launch.job import JobResult, JobSpec, ProcessExit
from emergency_ckpt.tools.launch.process_set import ProcessSet, ReservedPort
from emergency_ckpt.tools.launch.supervisor import Supervisor
from examples.faults.faults import parse_fault
from examples.faults.injection import FaultySupervisor

__all__ = [
    "JobEnvironment",
    "JobResult",
    "JobSpec",
    "ProcessSet",
    "ReservedPort",
    "Supervisor",
]

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


def wait_for_end(processes: ProcessSet, timeout_s: float = DEADLINE_S) -> tuple[ProcessExit, ...]:
    """Block until all have ended; return their ends by process index. Fail after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    processes.poll()
    while processes.running:
        assert time.monotonic() < deadline_s, f"processes {processes.running} still run"
        time.sleep(0.01)
        processes.poll()
    return processes.exits


def free_port() -> int:
    """A port of loopback that was free a moment ago; others may take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def supervisor_of(spec: JobSpec, *faults: str, **settings: Any) -> FaultySupervisor:
    """Return a supervisor of the job, which fires ``faults``, in the words of their text form."""
    return FaultySupervisor(spec, [parse_fault(text) for text in faults], **settings)


def run_job(spec: JobSpec, *faults: str, timeout_s: float = 120) -> JobResult:
    """Run the job to its end, with ``faults``."""
    return supervisor_of(spec, *faults).run(timeout_s)


def checked(result: JobResult) -> JobResult:
    """Return the result of a job that succeeded; else raise the job's error."""
    if result.error is not None:
        raise result.error
    return result


@contextlib.contextmanager
def job_of(program: str, scratch: Path, **settings: Any) -> Generator[JobSpec]:
    """Yield a job of two slices that runs the text ``program``, with ramdisks of its own.

    ``scratch``: an empty folder for the program and its logs. ``settings``: of ``JobSpec``.
    """
    script = scratch / "program.py"
    script.write_text(program)
    with tempfile.TemporaryDirectory(
        prefix="eckpt-test-", dir="/dev/shm", ignore_cleanup_errors=True
    ) as root:
        yield JobSpec(
            command=(sys.executable, str(script)),
            slices=2,
            devices_per_host=1,
            local_root=Path(root) / "ram",
            log_dir=scratch / "logs",
            max_restarts=1,
            keep_ram="always",
            **settings,
        )
