"""Checks at a start that would fail only later: settings, peers, storage, the directory's claim.

The step log of the persistent directory is read, and a free directory is claimed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.peers import Known, Peers
from emergency_ckpt.cluster.timelines import told_of_wait
from emergency_ckpt.config import Config
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptData,
    DirectoryInUse,
    PeerUnreachable,
    PersistentTierError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.host_memory import RAM_FILE_SYSTEMS, file_system_of
from emergency_ckpt.storage.probe import probe_storage
from emergency_ckpt.storage.steps.writer import DirectoryWriter
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import LOCAL

_COUNT = re.compile(r"(\d{1,6})(?:\(x\d{1,6}\))?", re.ASCII)
"""A number of Slurm's, equal on all nodes: ``8(x4)``."""
LAUNCHED_COUNT = "ECKPT_PROCESS_COUNT"
"""Number of processes that ``eckpt launch`` has started; set for each of them."""


def check_joined(process_count: int) -> None:
    """Raise ConfigError when a launcher has started more processes than JAX knows of, or fewer.

    Each would otherwise be a job of its own, all in one directory.
    """
    text = os.environ.get(LAUNCHED_COUNT, "")
    if not (text.isascii() and text.isdigit()) or int(text[:9]) == process_count:
        return
    raise ConfigError(
        [
            f"the launcher has started {int(text[:9])} processes ({LAUNCHED_COUNT}), but"
            f" jax.process_count() is {process_count}: call jax.distributed.initialize, or"
            " initialize_job of emergency_ckpt.tools.simulated_job, before anything else; a"
            f" program that is no part of the job must not have {LAUNCHED_COUNT} in its environment"
        ]
    )


def config_warnings(config: Config, process_index: int) -> list[str]:
    """Return a line for each setting that is probably a mistake. Not collective.

    Lines about the whole job are returned on process 0 only.
    """
    warnings = [] if process_index else _job_warnings(config)
    if LOCAL in config.save_plans():
        kind = file_system_of(config.local_dir)
        if kind is not None and kind not in RAM_FILE_SYSTEMS:
            warnings.append(
                f"local_dir {config.local_dir!r} lies on {kind}, not on tmpfs: saves to RAM wait"
                " for a disk; use a directory on a tmpfs such as /dev/shm"
            )
    return warnings


def device_warnings(device_count: int, environ: Mapping[str, str]) -> list[str]:
    """Return a line where Slurm gave this node more GPUs than its tasks see devices.

    ``jax.distributed.initialize`` takes one GPU for each task of Slurm. Only the first task of a
    node says so. ``device_count``: of this process.
    """
    gpus = _COUNT.fullmatch(environ.get("SLURM_GPUS_ON_NODE", ""))
    tasks = _COUNT.fullmatch(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if gpus is None or tasks is None or environ.get("SLURM_LOCALID") != "0":
        return []
    gpu_count, task_count = int(gpus[1]), int(tasks[1])
    if device_count * task_count >= gpu_count:
        return []
    return [
        f"Slurm gave this node {gpu_count} GPUs, and its tasks ({task_count}) have"
        f" {count_text(device_count, 'device', 'devices')} each: the other GPUs do nothing; start a"
        f" task for each GPU (--ntasks-per-node={gpu_count}), or let one task take all"
        f" (JAX_LOCAL_DEVICE_IDS=0,...,{gpu_count - 1})"
    ]


def _job_warnings(config: Config) -> list[str]:
    warnings: list[str] = []
    if not config.save_plans():
        warnings.append(
            "neither tier saves: no interval and no policy is set; this job can only restore"
        )
    if config.mesh is None and isinstance(config.replica_axis, str):
        warnings.append(
            f"replica_axis {config.replica_axis!r} is set, but mesh is not: slices are taken"
            " from the devices' slice_index, else from the mesh of the state's shardings"
        )
    return warnings


def neighbours(process: int, count: int) -> list[int]:
    """Return the processes before and after ``process`` in a ring of ``count``, without itself."""
    return sorted({(process - 1) % count, (process + 1) % count} - {process})


class PeerProbe:
    """Handshakes with this process's neighbours, all at once, from construction on.

    Each process is greeted by two others, however many there are.

    Args:
      process: (index, count) of this one.
      timeout_s: maximum duration of all of them together.
    """

    def __init__(
        self, peers: Peers, process: tuple[int, int], events: EventSink, timeout_s: float
    ) -> None:
        self._peers = peers
        self._events = events
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._errors: dict[int, CheckpointError | None] = {}
        self._addresses: dict[int, str] = {}
        # Daemons, because a name service may block for longer than any of our deadlines.
        self._threads = {
            peer: threading.Thread(
                target=self._greet, args=(peer,), name=f"eckpt-greeting-{peer}", daemon=True
            )
            for peer in neighbours(*process)
        }
        for thread in self._threads.values():
            thread.start()

    def finish(self, *, required: bool = False) -> None:
        """Wait for the answers until the deadline; a peer that cannot be reached is a warning.

        After all warnings, where all are ``required``: PeerUnreachable when one did not answer, or
        did not prove that it knows the run's secret.
        """
        absent: list[PeerUnreachable] = []
        for peer, thread in self._threads.items():
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
            error = self._errors.get(peer, self._silence(peer))
            if error is not None:
                self._warn(peer, error)
                absent.append(self._unreachable(peer, error))
        if absent and required:
            raise absent[0]

    def _greet(self, peer: int) -> None:
        try:
            address = self._addresses[peer] = self._peers.address_of(peer)
            self._peers.client.greet(address, self._timeout_s)
            self._errors[peer] = None
        except CheckpointError as error:
            self._errors[peer] = error
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            text = f"unexpected {type(error).__name__}: {error}"
            self._errors[peer] = CheckpointError("greet", f"process {peer}", text)

    def _name(self, peer: int) -> str:
        return f"process {peer} at {self._addresses.get(peer, 'an unknown address')}"

    def _unreachable(self, peer: int, error: CheckpointError) -> PeerUnreachable:
        return PeerUnreachable(
            "start",
            self._name(peer),
            f"it cannot be reached from this process: {error}",
            hint="open the port between all hosts of the job (bind_host, bind_port)",
        )

    def _silence(self, peer: int) -> CheckpointError:
        text = f"no answer within {self._timeout_s:g} s"
        return CheckpointError("greet", f"process {peer}", text)

    def _warn(self, peer: int, error: CheckpointError) -> None:
        text = (
            f"{self._name(peer)} cannot be reached from this process, so its RAM could not"
            f" be used here: {error}"
        )
        self._events.emit("start.warning", text=text)


_END_TIMEOUT_S = 1.0


class StorageProbe:
    """One test of the persistent directory, for the process that leads the writers.

    Args:
      timeout_s: maximum duration of the test.
    """

    def __init__(
        self, tier: PersistentTier, incarnation: str, events: EventSink, timeout_s: float
    ) -> None:
        self._tier = tier
        self._incarnation = incarnation
        self._events = events
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Test it now. Blocks for storage; PersistentTierError when saves could not use it."""
        deadline_s = time.monotonic() + self._timeout_s
        probe_storage(self._tier.storage, self._incarnation, deadline_s)

    def start(self) -> None:
        """Test it in the background; a failure is a warning. Does not block. Call once."""
        # A daemon, so that the interpreter's end does not wait for storage.
        self._thread = threading.Thread(target=self._warn, name="eckpt-probe", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop reporting, and wait at most a second so that a running test can clean up.

        A later start removes its leftovers otherwise.
        """
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
        self._ended.set()

    def _warn(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - reported, also when unexpected
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            if not self._ended.is_set():
                directory = self._tier.directory
                text = f"saves to {directory} would fail now; they are tried anyway: {kind}{error}"
                self._events.emit("start.warning", text=text)


_WRITE_TIMEOUT_S = 5.0
"""Short, because all processes wait for it."""


class ClaimAtStart:
    """The leader's part of a start: an inspection first, and the claim after all succeeded."""

    def __init__(
        self,
        writer: DirectoryWriter,
        events: EventSink,
        failures: Failures,
        *,
        saves_there: bool,
        deadline_s: float,
    ) -> None:
        """``saves_there``: the job saves to storage, so no other run may."""
        self._deadline_s = deadline_s
        self._writer = writer
        self._events = events
        self._failures = failures
        self._saves_there = saves_there
        self._refusal: DirectoryInUse | None = None
        self.has_read = False

    def inspect(self, directory: str, create: Callable[[float], None]) -> Known:
        """Read the log; return what it knows of the run. Blocks for storage.

        Never raises, because RAM may be enough. ``create``: makes the directory until a deadline.
        """
        try:
            with told_of_wait(self._events, directory, self._deadline_s):
                create(self._deadline_s)
                try:
                    self._writer.find(self._deadline_s)
                except DirectoryInUse as error:
                    self._refusal = error if self._saves_there else None
                known = Known(*self._writer.known(self._deadline_s))
        except (PersistentTierError, CorruptData) as error:
            # Storage may be down just when RAM is needed; saves try it again.
            self._events.emit("persistent.unreachable", reason=str(error))
            self._failures.record(error)
            return Known()
        self.has_read = True
        return known

    def check(self) -> None:
        """Raise DirectoryInUse when another run has the claim."""
        if self._refusal is not None:
            raise self._refusal

    def finish(self, incarnation: str) -> None:
        """Claim a directory that no run has; in one of this run take this incarnation's number.

        DirectoryInUse when another run has just claimed it. Call last, because a start that fails
        must not keep a directory from other runs. A storage failure now is left to the saves.
        """
        if self.has_read and self._saves_there:
            try:
                self._writer.enter(incarnation, time.monotonic() + _WRITE_TIMEOUT_S)
            except DirectoryInUse:
                raise
            except (PersistentTierError, CorruptData) as error:
                self._events.emit("persistent.unreachable", reason=str(error)[:500])
