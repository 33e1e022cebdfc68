"""The processes of one life: started once, watched, signalled, ended. Does not restart them."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.extras.progress import NO_STEP, ProgressFile
from emergency_ckpt.run_secret import LAUNCHER_VARIABLE
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.launch import janitor
from emergency_ckpt.tools.launch.job import EventSink, JobSpec, LogFollower, ProcessExit

LOOPBACK = "127.0.0.1"

POLL_S = 0.01
KILL_DEADLINE_S = 30.0
"""Time in seconds after which a process that SIGKILL did not end is an error (stuck in the kernel).
"""

_JANITOR_EXIT_S = 10.0

# The process registers with the janitor before the user's command runs: standard input is the
# janitor's pipe until then. If the supervisor registered it after the start, its death in between
# would leave the process running.
_SHIM = 'echo "+$$" >&0 && exec 0</dev/null && exec "$@"'

_OBSERVERS_VARIABLE = "ECKPT_OBSERVERS"
_OBSERVERS = "event_log progress"
"""What a checkpointer keeps on record and reports, whatever its program does."""
# A step that cannot overwrite its donated state, because a save still reads it, writes to new
# memory, which takes a fraction of the time in large pages. Only read when a process starts.
_MALLOC_ENVIRON = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

_MIN_COMPILE_TIME_S = 0.1
"""Compilations that take less are not kept. JAX's default is 1 s; a small model's take less."""


class ReservedPort:
    """A free TCP port on loopback, reserved while this object is open.

    The socket is bound with SO_REUSEPORT and never listens. No other program can take the port
    before the coordinator starts, but a server of the same user that sets SO_REUSEPORT too, as
    gRPC does, can bind it and gets every connection.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


@dataclass
class _HostProcess:
    index: int
    host: int
    popen: subprocess.Popen[bytes]
    descriptor: int
    """Tells of the end of the process, and leaves its pid reserved (``pidfd_open``)."""
    progress: ProgressFile
    follower: LogFollower | None
    exit: ProcessExit | None = None


class ProcessSet:
    """One process per host, each the leader of its own process group and session.

    All of them end when this program ends, also by SIGKILL. Not thread-safe. Use it as a context
    manager: its exit ends every process that still runs.
    """

    def __init__(
        self,
        spec: JobSpec,
        host_of_process: Sequence[int] | None = None,
        *,
        restart_count: int = 0,
        holds: Mapping[int, int] | None = None,
        on_event: EventSink | None = None,
    ) -> None:
        """Start all processes; returns once they run, before they have joined each other.

        Makes missing directories, also the hosts' ramdisks. Overwrites logs of an earlier job with
        the same ``log_dir`` and ``restart_count``.

        Args:
          host_of_process: the host that runs each process index; default: host i runs process i.
          holds: for some processes the step of ``hold_at`` from their start on.

        Raises:
          OSError: a directory, port or process could not be made; no process is left running.
        """
        self.spec = spec
        self.host_of_process = tuple(host_of_process or range(spec.host_count))
        self.restart_count = restart_count
        self.started_s = time.monotonic()
        self._holds = holds or {}
        self._on_event = on_event
        self._processes: list[_HostProcess] = []
        self._progress_dir = spec.private_dir / f"life_{restart_count:03d}"
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", janitor.__file__],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._port = ReservedPort()
        try:
            self._start_all()
        except BaseException:
            self.end(grace_s=0)
            self.close()
            raise

    def __enter__(self) -> ProcessSet:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.end(grace_s=self.spec.grace_s if kind is None else 0)
        finally:
            self.close()

    @property
    def running(self) -> tuple[int, ...]:
        """Return the processes that have not ended as of the last ``poll``, ascending."""
        return tuple(i for i, process in enumerate(self._processes) if process.exit is None)

    @property
    def exits(self) -> tuple[ProcessExit, ...]:
        """Return the ends of processes as of the last ``poll``, by process index."""
        return tuple(process.exit for process in self._processes if process.exit is not None)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the last step that each process reported, -1 before its first."""
        return tuple(process.progress.step for process in self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids, by process index."""
        return tuple(process.popen.pid for process in self._processes)

    def poll(self) -> tuple[ProcessExit, ...]:
        """Return the ends of processes since the last call, and pass log lines. Never blocks.

        When a process has ended, the rest of its group is killed.
        """
        ended = [process for process in self._processes if process.exit is None and _over(process)]
        exits = tuple(self._reap(process) for process in ended)
        for process in self._processes:
            if process.follower is not None:
                process.follower.poll()
        return exits

    def signal(self, processes: Iterable[int], signum: int) -> None:
        """Send ``signum`` to the whole group of each process that has not ended."""
        for index in processes:
            process = self._processes[index]
            if process.exit is None:
                os.killpg(process.popen.pid, signum)

    def hold_at(self, processes: Iterable[int], step: int) -> None:
        """Make ``processes`` wait inside ``report_step(step)``; -1 lets them continue."""
        for index in processes:
            self._processes[index].progress.hold_at(step)

    def end(
        self, *, grace_s: float, hurries: Callable[[], bool] = lambda: False
    ) -> tuple[ProcessExit, ...]:
        """End every process: SIGTERM, ``grace_s`` seconds, SIGKILL to the whole group.

        Process 0 is last, after the others have ended: it runs the coordination service, without
        which the others abort before their own exit. Blocks for at most twice ``grace_s`` plus the
        kernel's time. Also continues stopped processes, so that they can end.

        Args:
          hurries: ends the grace of all processes when it returns True.

        Raises:
          DeadlineExceeded: a process survived SIGKILL for ``KILL_DEADLINE_S``.
        """
        for group in (range(1, len(self._processes)), range(min(1, len(self._processes)))):
            self._end_group(group, grace_s, hurries)
        return self.exits

    def close(self) -> None:
        """Release ports, files and the janitor, which kills processes that have not ended."""
        self._port.close()
        if self._progress_dir.exists():
            shutil.rmtree(self._progress_dir)
        for process in self._processes:
            process.progress.close()
            if process.follower is not None:
                process.follower.close()
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait(_JANITOR_EXIT_S)

    def _start_all(self) -> None:
        for directory in (self._progress_dir, self.spec.life_dir(self.restart_count)):
            directory.mkdir(parents=True, exist_ok=True)
        for host in self.host_of_process:
            self.spec.ramdisk(host).mkdir(mode=0o700, parents=True, exist_ok=True)
        for index, host in enumerate(self.host_of_process):
            self._processes.append(self._start(index, host))
            self._emit("process.started", process=index, host=host, pid=self.pids[index])

    def _start(self, index: int, host: int) -> _HostProcess:
        progress_path = self._progress_dir / f"progress_{index:05d}"
        environment = JobEnvironment(
            coordinator_address=self._port.address,
            process_index=index,
            process_count=self.spec.host_count,
            slice_index=index // self.spec.hosts_per_slice,
            slice_count=self.spec.slices,
            devices_per_host=self.spec.devices_per_host,
            local_dir=self.spec.ramdisk(host),
            restart_count=self.restart_count,
            progress_path=progress_path,
            event_log=self.spec.event_log,
        )
        log_path = self.spec.log_path(self.restart_count, index)
        progress = ProgressFile(progress_path, create=True)
        if index in self._holds:
            progress.hold_at(self._holds[index])
        observers = (os.environ.get(_OBSERVERS_VARIABLE), self.spec.env.get(_OBSERVERS_VARIABLE))
        variables = {
            **_MALLOC_ENVIRON,
            # Each life after the first loads what the first one compiled.
            "JAX_COMPILATION_CACHE_DIR": str(self.spec.private_dir / "compilation_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(_MIN_COMPILE_TIME_S),
            **_inherited_environ(),
            LAUNCHER_VARIABLE: self.spec.secret,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **environment.jax_environ(),
            **self.spec.env,
            _OBSERVERS_VARIABLE: " ".join(filter(None, (*observers, _OBSERVERS))),
            **environment.to_environ(),
        }
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                ["/bin/sh", "-c", _SHIM, "eckpt-host", *self.spec.command],
                stdin=self._janitor.stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        follower = None
        if self.spec.echo is not None:
            prefix = f"[{self.restart_count}.{index}] "
            follower = LogFollower(log_path, prefix, self.spec.echo)
        descriptor = os.pidfd_open(popen.pid)
        return _HostProcess(index, host, popen, descriptor, progress, follower)

    def _reap(self, process: _HostProcess) -> ProcessExit:
        # The ended leader keeps its pid until it is reaped, so no other group has this number.
        os.killpg(process.popen.pid, signal.SIGKILL)
        os.close(process.descriptor)
        process.exit = ProcessExit(
            process=process.index,
            host=process.host,
            returncode=process.popen.wait(),
            step=process.progress.step,
        )
        self._forget(process.popen.pid)
        step = process.exit.step if process.exit.step != NO_STEP else None
        self._emit(
            "process.exited",
            process=process.exit.process,
            host=process.host,
            returncode=process.exit.returncode,
            step=step,
        )
        return process.exit

    def _forget(self, group: int) -> None:
        assert self._janitor.stdin is not None
        try:
            os.write(self._janitor.stdin.fileno(), b"-%d\n" % group)
        except BrokenPipeError:
            # The janitor was killed. The processes must still be ended; the next life has a new
            # janitor.
            self._emit("janitor.lost", returncode=self._janitor.wait(_JANITOR_EXIT_S))

    def _end_group(
        self, processes: Sequence[int], grace_s: float, hurries: Callable[[], bool]
    ) -> None:
        if grace_s > 0:
            self.signal(processes, signal.SIGTERM)
            self.signal(processes, signal.SIGCONT)
            until_s = time.monotonic() + grace_s
            while self._still_running(processes) and time.monotonic() < until_s and not hurries():
                self.poll()
                time.sleep(POLL_S)
        self.signal(processes, signal.SIGKILL)
        deadline_s = time.monotonic() + KILL_DEADLINE_S
        self.poll()
        while left := self._still_running(processes):
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    "kill",
                    f"{len(processes)} processes",
                    f"some still run after {KILL_DEADLINE_S:g} s",
                    missing=[f"process {index} (pid {self.pids[index]})" for index in left],
                )
            time.sleep(POLL_S)
            self.poll()

    def _still_running(self, processes: Sequence[int]) -> list[int]:
        return [index for index in processes if self._processes[index].exit is None]

    def _emit(self, name: str, **fields: object) -> None:
        if self._on_event is not None:
            life = self.restart_count
            self._on_event(LoggedEvent(time_s=time.time(), name=name, fields=fields, life=life))


def _inherited_environ() -> dict[str, str]:
    """Return this process's environment without ``MEGASCALE_*``, by which a TPU's runtime waits.

    The hosts of the job are on this machine, so those name the slices of another job.
    """
    variables = os.environ.items()
    return {name: value for name, value in variables if not name.startswith("MEGASCALE_")}


def _over(process: _HostProcess) -> bool:
    """Return True when the process has ended; the zombie keeps its pid reserved."""
    watch = select.poll()
    watch.register(process.descriptor, select.POLLIN)
    return bool(watch.poll(0))
