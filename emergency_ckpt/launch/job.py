"""What a job is, and what is told about it: specification, events, results."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.launch.faults import Fault
from emergency_ckpt.launch.job_layout import JobLayout
from emergency_ckpt.launch.logs import LineSink
from emergency_ckpt.run_secret import generate_secret

KeepRam = Literal["after-failure", "always", "never"]
Ending = Literal["finished", "died", "hung", "stopped", "timeout"]

MAX_HOSTS = 256
"""Bound on the processes of one job: they share one machine."""


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to the job.

    Attributes:
      name: job.started, life.started, process.started, process.exited, fault.fired, ram.lost,
        life.ended, janitor.lost, job.restarting, job.finished or job.failed.
      fields: details: plain numbers, strings and lists of them.
      time_s: Unix time.
    """

    name: str
    fields: Mapping[str, object]
    time_s: float = field(default_factory=time.time)


EventSink = Callable[[JobEvent], None]


def _no_environ() -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class JobSpec:
    """A job of one process per host.

    Attributes:
      command: the program and its arguments, the same for every process.
      slices, hosts_per_slice, devices_per_host: the shape of the job.
      local_root: directory of all ramdisks; host ``h`` gets ``host_<h>`` in it. Should be on tmpfs.
      log_dir: gets ``life_<n>/process_<p>.log``; a program may make an events file beside it.
      env: variables added to this process's own environment for every process of the job. Where
        neither has ``GLIBC_TUNABLES``, it asks for large pages.
      secret: of this job, for processes that the user gives none; in their environment, where no
        other user of the machine reads it. Two jobs have different ones.
      max_restarts: lives after the first, whatever ended a life.
      breaker_deaths: stop after so many deaths in a row that brought the job no further than it
        had been before. Deaths by an injected fault do not count.
      hang_timeout_s: no process reports a higher step for so long (start-up and compilation
        included): all are ended, which counts as a death. None: wait for ever.
      grace_s: time between SIGTERM and SIGKILL when all are ended; process 0 gets it anew, after
        the others are gone.
      keep_ram: what becomes of ``local_root`` at the end; by default only a job that succeeded
        removes it.
      echo: called with each line that a process prints, prefixed with life and process.
    """

    command: tuple[str, ...]
    slices: int
    hosts_per_slice: int
    devices_per_host: int
    local_root: Path
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=_no_environ)
    secret: str = field(default_factory=lambda: generate_secret().decode(), repr=False)
    max_restarts: int = 5
    breaker_deaths: int = 3
    hang_timeout_s: float | None = None
    grace_s: float = 1.0
    keep_ram: KeepRam = "after-failure"
    echo: LineSink | None = None

    def __post_init__(self) -> None:
        problems = _spec_problems(self)
        if problems:
            raise ConfigError(problems, target="the job")

    @property
    def first_topology(self) -> JobLayout:
        """Hosts and processes of the first life."""
        return JobLayout.first(self.slices, self.hosts_per_slice)

    def ramdisk(self, host: int) -> Path:
        """The directory that stands for the RAM of ``host``."""
        return self.local_root / f"host_{host:05d}"

    @property
    def private_dir(self) -> Path:
        """Where the supervisor keeps its own files: it is no host's RAM, so no fault hits it."""
        return self.local_root / "supervisor"

    def life_dir(self, restart_count: int) -> Path:
        """Logs and events of one life."""
        return self.log_dir / f"life_{restart_count:03d}"

    def log_path(self, restart_count: int, process: int) -> Path:
        """What one process printed in one life."""
        return self.life_dir(restart_count) / f"process_{process:05d}.log"

    def events_path(self, restart_count: int, process: int) -> Path:
        """``JobEnvironment.events_path`` of one process in one life."""
        return self.life_dir(restart_count) / f"events_{process:05d}.jsonl"


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended.

    Attributes:
      process, host: who.
      returncode: exit status, or minus the signal that ended it.
      step: the last step that it reported, -1 when none.
    """

    process: int
    host: int
    returncode: int
    step: int

    def __str__(self) -> str:
        how = f"exit status {self.returncode}"
        if self.returncode < 0:
            how = f"signal {_signal_name(-self.returncode)}"
        return f"process {self.process} on host {self.host} ended with {how}"


@dataclass(frozen=True)
class LifeResult:
    """One life of the job.

    Attributes:
      restart_count: 0 for the first life.
      ending: why it ended.
      step: the highest step that a process reported, -1 when none.
      first_death: the process whose end ended the life, where one did.
      exits: every process's end, by process index; also of those that the supervisor ended.
      injected: a deadly fault was injected in this life.
      seconds: from the first process's start to the last one's end.
    """

    restart_count: int
    ending: Ending
    step: int
    first_death: ProcessExit | None
    exits: tuple[ProcessExit, ...]
    injected: bool
    seconds: float


@dataclass(frozen=True)
class JobResult:
    """What became of the job.

    Attributes:
      exit_code: 0; the status of the process that failed first (128 + signal when one killed it);
        124 after a timeout or a hang; 128 + signal after a stop.
      lives: every life, in order.
      events: every event, in order.
      faults_left: faults that never fired.
      error: why the job failed, with the end of the log that matters; None after success.
    """

    exit_code: int
    lives: tuple[LifeResult, ...]
    events: tuple[JobEvent, ...]
    faults_left: tuple[Fault, ...]
    error: CheckpointError | None

    def check(self) -> JobResult:
        """This result, when the job succeeded.

        Raises:
          CheckpointError: ``error``, when it did not.
        """
        if self.error is not None:
            raise self.error
        return self


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)  # real-time signals have no names


def _spec_problems(spec: JobSpec) -> list[str]:
    problems: list[str] = []
    if not spec.command:
        problems.append("no command was given")
    elif shutil.which(spec.command[0]) is None:
        problems.append(f"command {spec.command[0]!r} was not found or cannot be run")
    for name in ("slices", "hosts_per_slice", "devices_per_host", "breaker_deaths"):
        if getattr(spec, name) < 1:
            problems.append(f"{name} must be at least 1, got {getattr(spec, name)}")
    if spec.slices * spec.hosts_per_slice > MAX_HOSTS:
        problems.append(f"at most {MAX_HOSTS} hosts, got {spec.slices * spec.hosts_per_slice}")
    if spec.max_restarts < 0:
        problems.append(f"max_restarts must not be negative, got {spec.max_restarts}")
    if spec.hang_timeout_s is not None and not spec.hang_timeout_s > 0:
        problems.append(f"hang_timeout_s must be positive, got {spec.hang_timeout_s}")
    if not (spec.grace_s >= 0 and math.isfinite(spec.grace_s)):
        problems.append(f"grace_s must be a finite time, 0 or more, got {spec.grace_s}")
    for name in ("local_root", "log_dir"):
        path: Path = getattr(spec, name)
        if not path.is_absolute():
            problems.append(f"{name} must be an absolute path, got {path}")
    return problems
