"""The types of a job: its specification, events, logs and results.

Processes write into log files, not into a pipe of the supervisor. So no output is lost, and no
process blocks or gets SIGPIPE when the supervisor stops or dies.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from emergency_ckpt.core.limits import MAX_HOSTS, MAX_LINE_BYTES
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.run_secret import generate_secret

LineSink = Callable[[str], None]
KeepRam = Literal["after-failure", "always", "never"]
Ending = Literal["finished", "died", "stopped", "timeout"]

_READ_BYTES = 256 * 1024
_TAIL_LINES, _TAIL_BYTES = 30, 16 * 1024

EventSink = Callable[[LoggedEvent], None]
"""A function that takes each event of the job, with the life and fields of numbers, strings, and
sequences of them: job.started, life.started, process.started, process.exited, life.ended,
janitor.lost, job.restarting, job.finished or job.failed.
"""


@dataclass(frozen=True)
class JobSpec:
    """A job of one process per host.

    A host is a machine: the host owns a ramdisk and keeps its number during the whole job. A
    process index is a label that a host gets in each life. JAX on CPU orders devices by process
    index, so the slice of a process follows from the index.

    Attributes:
      command: the program and its arguments, the same for every process.
      slices, hosts_per_slice, devices_per_host: the shape of the job.
      local_root: directory of all ramdisks, with ``host_<h>`` for host ``h``. Should be on tmpfs.
      log_dir: directory for ``life_<n>/process_<p>.log`` and for ``events``, the job's event log.
      env: variables added to this process's environment for every process of the job. If neither
        has ``GLIBC_TUNABLES``, it requests large pages; if neither has
        ``JAX_COMPILATION_CACHE_DIR``, JAX's compilation cache is a directory of the job. The
        observers in ``ECKPT_OBSERVERS`` of both are joined. Variables ``MEGASCALE_*`` of this
        process are not passed on.
      secret: the job's secret for processes without one from the user; in their environment, which
        no other user of the machine can read. Two jobs have different ones.
      max_restarts: maximum number of lives after the first.
      grace_s: seconds between SIGTERM and SIGKILL when the job is stopped or has reached its
        timeout, or when a process has left after a notice of preemption; process 0 gets them again
        after the others have ended. Processes that are left after another death have
        ``SURVIVORS_GRACE_S``. Should be longer than the job's ``preemption_grace_s``.
      keep_ram: rule for ``local_root`` at the end; by default only a successful job removes it.
      echo: called with each line that a process prints, prefixed with life and process. It must not
        block: the job is not watched meanwhile.
    """

    command: tuple[str, ...]
    slices: int
    hosts_per_slice: int
    devices_per_host: int
    local_root: Path
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secret: str = field(default_factory=lambda: generate_secret().decode(), repr=False)
    max_restarts: int = 5
    grace_s: float = 30.0
    keep_ram: KeepRam = "after-failure"
    echo: LineSink | None = None

    def __post_init__(self) -> None:
        problems = _spec_problems(self)
        if problems:
            raise ConfigError(problems, target="the job")

    @property
    def host_count(self) -> int:
        """Return the number of hosts, which is also the number of processes."""
        return self.slices * self.hosts_per_slice

    def ramdisk(self, host: int) -> Path:
        """Return the directory that stands for the RAM of ``host``."""
        return self.local_root / f"host_{host:05d}"

    @property
    def private_dir(self) -> Path:
        """Return the directory of the supervisor's own files, which no fault affects."""
        return self.local_root / "supervisor"

    def life_dir(self, restart_count: int) -> Path:
        """Return the directory of one life's logs."""
        return self.log_dir / f"life_{restart_count:03d}"

    def log_path(self, restart_count: int, process: int) -> Path:
        """Return the path of a process's log in one life."""
        return self.life_dir(restart_count) / f"process_{process:05d}.log"

    @property
    def event_log(self) -> Path:
        """Return the directory of the event log of all lives."""
        return self.log_dir / "events"


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process.

    Attributes:
      process, host: their indices.
      returncode: exit status, or minus the signal that ended it.
      step: the last step that it reported, -1 without one.
    """

    process: int
    host: int
    returncode: int
    step: int

    def __str__(self) -> str:
        how = f"exit status {self.returncode}"
        if self.returncode < 0:
            number = -self.returncode
            is_named = number in set(signal.Signals)  # real-time signals have no names
            how = f"signal {signal.Signals(number).name if is_named else number}"
        return f"process {self.process} on host {self.host} ended with {how}"


@dataclass(frozen=True)
class LifeResult:
    """One life of the job.

    Attributes:
      restart_count: 0 for the first life.
      ending: the reason of its end.
      step: the highest step that a process reported, -1 without one.
      first_death: the process whose death ended the life, or None.
      exits: the end of every process, by index; also of those that the supervisor ended.
      seconds: time from the first process's start to the last one's end.
    """

    restart_count: int
    ending: Ending
    step: int
    first_death: ProcessExit | None
    exits: tuple[ProcessExit, ...]
    seconds: float


@dataclass(frozen=True)
class JobResult:
    """The result of the job.

    Attributes:
      exit_code: 0; the status of the process that failed first (128 + signal if one killed it); 124
        after a timeout; 128 + signal after a stop.
      lives: every life, in order.
      events: every event, in order.
      error: the failure, with the end of the relevant log; None after success.
    """

    exit_code: int
    lives: tuple[LifeResult, ...]
    events: tuple[LoggedEvent, ...]
    error: CheckpointError | None


def _spec_problems(spec: JobSpec) -> list[str]:
    problems: list[str] = []
    if not spec.command:
        problems.append("no command was given")
    elif shutil.which(spec.command[0]) is None:
        problems.append(f"command {spec.command[0]!r} was not found or cannot be run")
    for name in ("slices", "hosts_per_slice", "devices_per_host"):
        if getattr(spec, name) < 1:
            problems.append(f"{name} must be at least 1, got {getattr(spec, name)}")
    if spec.host_count > MAX_HOSTS:
        problems.append(f"at most {MAX_HOSTS} hosts, got {spec.host_count}")
    if spec.max_restarts < 0:
        problems.append(f"max_restarts must not be negative, got {spec.max_restarts}")
    if not (spec.grace_s >= 0 and math.isfinite(spec.grace_s)):
        problems.append(f"grace_s must be a finite time, 0 or more, got {spec.grace_s}")
    for name in ("local_root", "log_dir"):
        path: Path = getattr(spec, name)
        if not path.is_absolute():
            problems.append(f"{name} must be an absolute path, got {path}")
    return problems


class LogFollower:
    """Passes each new line of a growing file to ``sink``, with a prefix."""

    def __init__(self, path: Path, prefix: str, sink: LineSink) -> None:
        self._file = path.open("rb", buffering=0)
        self._prefix = prefix
        self._sink = sink
        self._partial = b""

    def poll(self) -> bool:
        """Pass the lines that the next part of the file completes; return whether it has one.

        Never blocks. One part a call, since a process may write faster than ``sink`` takes lines.
        """
        data = self._file.read(_READ_BYTES)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._partial) > MAX_LINE_BYTES:
            self._flush()
        return bool(data)

    def close(self) -> None:
        """Pass the rest, also a last line without a line end, and close the file."""
        end = os.fstat(self._file.fileno()).st_size  # a process that got away may still write
        while self._file.tell() < end and self.poll():
            pass
        if self._partial:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        line, self._partial = self._partial, b""
        self._emit(line)

    def _emit(self, line: bytes) -> None:
        self._sink(self._prefix + line.decode("utf-8", errors="replace").rstrip("\r"))


def log_tail(path: Path) -> str:
    """Return the last lines of a log file, 30 lines and 16 KiB at most.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
