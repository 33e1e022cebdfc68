"""The supervisor of a multi-process job on one machine: start, watch, end all, restart.

It imports no module that imports JAX, since it must survive every failure of its processes. It has
one thread and no signal handlers: its caller handles signals and calls ``stop``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence

from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    JobFailed,
    LocalTierError,
)
from emergency_ckpt.extras.event_log import EventLog, LoggedEvent, open_event_log
from emergency_ckpt.extras.progress import NO_STEP
from emergency_ckpt.files import NotOwn
from emergency_ckpt.ram.ownership import ensure_run_directory
from emergency_ckpt.tools.launch.job import (
    Ending,
    EventSink,
    JobResult,
    JobSpec,
    LifeResult,
    ProcessExit,
    log_tail,
)
from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

TIMEOUT_EXIT_CODE = 124
"""The exit status of timeout(1)."""

SURVIVORS_GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL for the processes that are left when one has died."""

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""A process that leaves with it after a preemption save."""

NO_STEPS = (
    "no process has reported a step: a loop reports steps by ckpt.save, which it calls after each"
    " step, or by emergency_ckpt.extras.progress.report_step"
)

_LOG_BYTES = 64 << 20
_UNCAUGHT_EXIT_CODE = 1
_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
"""The last line of its traceback begins so."""


class Supervisor:
    """Runs one job to its end. One ``run`` per object.

    A life ends when all processes finished with status 0, or as soon as one ended otherwise. The
    survivors then hang in a collective, so all are ended and started again with new ports, the same
    ramdisks and the next restart count. A process may finish with 0 while others still run; when
    another one dies later, all are restarted.
    """

    def __init__(self, spec: JobSpec, on_event: EventSink | None = None) -> None:
        """Start no process. ``on_event`` is called in the thread of ``run``; it must be quick."""
        self.spec = spec
        self._on_event = on_event
        self._events: list[LoggedEvent] = []
        self._lives: list[LifeResult] = []
        self._stop_signal = 0
        self._hurries = False
        self._log: EventLog | None = None

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Make ``run`` end all processes and return; a second call, without their grace.

        Safe in any thread or signal handler.
        """
        self._hurries = self._stop_signal != 0
        self._stop_signal = signum

    def run(self, timeout_s: float | None = None) -> JobResult:
        """Run the job; blocks until all its processes have ended.

        A failed job is a result, not an exception: see ``JobResult.error``.

        Args:
          timeout_s: end all processes after this time in seconds; None: no limit.

        Raises:
          LocalTierError: another supervisor uses the same ``local_root``.
          OSError: a process could not be started or a directory not made.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        ramdisks = Ramdisks(self.spec)
        succeeded = False
        self._log = open_event_log(self.spec.event_log, None, limit_bytes=_LOG_BYTES)
        try:
            self._emit("job.started", command=self.spec.command, hosts=self.spec.host_count)
            reason = self._run_lives(deadline_s)
            result = self._result(reason)
            succeeded = result.error is None
        finally:
            keep = self.spec.keep_ram
            ramdisks.close(remove=keep == "never" or (succeeded and keep != "always"))
            self._log.close()
        return result

    def _begin_life(self) -> tuple[tuple[int, ...], Mapping[int, int]]:
        """Return the host of each process in the next life, and the steps at which some wait.

        A subclass that injects faults overrides this function and ``_disturb``.
        """
        return tuple(range(self.spec.host_count)), {}

    def _disturb(self, processes: ProcessSet) -> None:
        """Inject the faults that are due. Never blocks; called every few milliseconds."""

    def _run_lives(self, deadline_s: float | None) -> str:
        """Run lives until the policy decides against another one; return its reason."""
        while True:
            host_of_process, holds = self._begin_life()
            with ProcessSet(
                self.spec,
                host_of_process,
                restart_count=len(self._lives),
                holds=holds,
                on_event=self._record,
            ) as processes:
                self._emit("life.started", host_of_process=host_of_process)
                life = self._run_life(processes, deadline_s)
            self._emit("life.ended", ending=life.ending, step=life.step, seconds=life.seconds)
            self._lives.append(life)
            restarts, reason = decide(
                self._lives,
                max_restarts=self.spec.max_restarts,
                is_configuration=self._is_configuration(life),
            )
            if not restarts:
                return reason
            self._emit("job.restarting", reason=reason)

    def _is_configuration(self, life: LifeResult) -> bool:
        """Return whether a ConfigError that nobody caught has ended a process of ``life``."""
        paths = [
            self.spec.log_path(life.restart_count, process_exit.process)
            for process_exit in life.exits
            if process_exit.returncode == _UNCAUGHT_EXIT_CODE
        ]
        return any(
            line.startswith(_CONFIG_ERROR) for path in paths for line in log_tail(path).splitlines()
        )

    def _run_life(self, processes: ProcessSet, deadline_s: float | None) -> LifeResult:
        ending, first_death = self._watch(processes, deadline_s)
        grace_s = self.spec.grace_s
        is_preempted = first_death is not None and first_death.returncode == PREEMPTED_EXIT_CODE
        if ending == "died" and not is_preempted:  # the others hang in a collective
            grace_s = min(grace_s, SURVIVORS_GRACE_S)
        exits = processes.end(grace_s=grace_s, hurries=lambda: self._hurries)
        return LifeResult(
            restart_count=processes.restart_count,
            ending=ending,
            step=max(processes.steps),
            first_death=first_death,
            exits=exits,
            seconds=time.monotonic() - processes.started_s,
        )

    def _watch(
        self, processes: ProcessSet, deadline_s: float | None
    ) -> tuple[Ending, ProcessExit | None]:
        """Block until the life has ended, or must end."""
        while True:
            self._disturb(processes)
            deaths = [exit_ for exit_ in processes.poll() if exit_.returncode != 0]
            if deaths:
                return "died", _root_cause(deaths)
            if not processes.running:
                return "finished", None
            if self._stop_signal:
                return "stopped", None
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return "timeout", None
            time.sleep(POLL_S)

    def _result(self, reason: str) -> JobResult:
        last = self._lives[-1]
        error = None if last.ending == "finished" else self._error(last, reason)
        name = "job.finished" if error is None else "job.failed"
        self._emit(name, life=last.restart_count, reason=reason)
        return JobResult(
            exit_code=self._exit_code(last),
            lives=tuple(self._lives),
            events=tuple(self._events),
            error=error,
        )

    def _exit_code(self, last: LifeResult) -> int:
        if last.ending == "stopped":
            return 128 + self._stop_signal
        if last.first_death is not None:
            code = last.first_death.returncode
            return code if code > 0 else 128 - code
        return 0 if last.ending == "finished" else TIMEOUT_EXIT_CODE

    def _error(self, last: LifeResult, reason: str) -> CheckpointError:
        target = f"job of {self.spec.host_count} processes"
        logs = self.spec.life_dir(last.restart_count)
        if last.ending == "timeout":
            return DeadlineExceeded("run", target, reason, hint=f"logs are in {logs}")
        if last.ending == "stopped":
            name = signal.Signals(self._stop_signal).name
            killed = [end.process for end in last.exits if end.returncode == -signal.SIGKILL]
            text = f"processes that did not end in time and were killed: {killed}"
            return JobFailed("run", target, f"{reason} ({name})", hint=text if killed else "")
        problem = reason
        hint = f"logs are in {logs}"
        if all(life.step == NO_STEP for life in self._lives):
            problem += f"; {NO_STEPS}"
        if last.first_death is not None:
            path = self.spec.log_path(last.restart_count, last.first_death.process)
            problem += f"; {last.first_death}"
            hint += f"; the end of {path}:\n{log_tail(path)}"
        return JobFailed("run", target, problem, hint=hint)

    def _emit(self, name: str, *, life: int | None = None, **fields: object) -> None:
        life = len(self._lives) if life is None else life
        self._record(LoggedEvent(time_s=time.time(), name=name, fields=fields, life=life))

    def _record(self, event: LoggedEvent) -> None:
        self._events.append(event)
        if self._log is not None:
            self._log.note(event.name, event.fields, time_s=event.time_s, life=event.life)
        if self._on_event is not None:
            self._on_event(event)


def _root_cause(deaths: Sequence[ProcessExit]) -> ProcessExit:
    """Return the likely cause among simultaneous ends: JAX aborts when a peer has died."""
    return min(deaths, key=lambda death: (death.returncode == -signal.SIGABRT, death.process))


def decide(
    lives: Sequence[LifeResult], *, max_restarts: int, is_configuration: bool
) -> tuple[bool, str]:
    """Return whether another life begins after the last of ``lives``, and the reason.

    ``is_configuration``: a process of the last one was ended by a ConfigError.
    """
    last = lives[-1]
    if last.ending == "finished":
        return False, "all processes finished"
    if last.ending in ("stopped", "timeout"):
        return False, "stopped on request" if last.ending == "stopped" else "out of time"
    if is_configuration:
        return False, "a configuration error, which no restart mends"
    if len(lives) > max_restarts:
        return False, f"the limit of {max_restarts} restarts is reached"
    return True, str(last.first_death)


class Ramdisks:
    """All ramdisks of a job, owned by one supervisor at a time; a crash releases its file lock."""

    def __init__(self, spec: JobSpec) -> None:
        """Make missing directories; contents of an earlier job of this user are kept.

        Raises:
          LocalTierError: another supervisor uses the same ``local_root``; or another user may have
            put something into it, such as compiled code.
          OSError: a directory cannot be made.
        """
        self._spec = spec
        self._is_new = not spec.local_root.exists()
        try:
            ensure_run_directory(spec.private_dir)
        except NotOwn as error:
            problem = f"{error.filename}: {error.strerror}"
            raise LocalTierError(
                "launch", str(spec.local_root), problem, hint=error.hint
            ) from error
        lock_path = spec.private_dir / "owner.lock"
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = lock_path.exists() and os.path.samestat(os.fstat(self._lock), lock_path.stat())
        except BlockingIOError:
            is_own = False
        if not is_own:  # locked, or removed by the last owner between our open and our lock
            os.close(self._lock)
            raise LocalTierError(
                "launch",
                str(spec.local_root),
                "another job runs with this local root",
                hint="wait for it, or give another --local-root",
            )
        for host in range(spec.host_count):
            spec.ramdisk(host).mkdir(mode=0o700, exist_ok=True)

    def close(self, *, remove: bool) -> None:
        """Release the ramdisks, or remove them, and a ``local_root`` that this object made."""
        spec = self._spec
        for life_dir in spec.private_dir.glob("life_*"):
            shutil.rmtree(life_dir)
        if remove:
            for host in range(spec.host_count):
                if spec.ramdisk(host).exists():
                    shutil.rmtree(spec.ramdisk(host))
            shutil.rmtree(spec.private_dir)  # the lock is held until its file is gone
        os.close(self._lock)
        if remove and self._is_new:
            with contextlib.suppress(OSError):  # something else lies there now
                spec.local_root.rmdir()
