"""Checks at a start: settings, the directory's claim and, with ``require``, the peers."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.peers import Known, Peers
from emergency_ckpt.cluster.timelines import told_of_wait
from emergency_ckpt.config import Config
from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptData,
    DirectoryInUse,
    PeerUnreachable,
    PersistentTierError,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.steps.writer import DirectoryWriter

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


_NO_THREADS_AT_THE_END = (3, 12), (3, 12, 3)
"""Python from the first to before the second starts no thread once the program has ended."""


def config_warnings(config: Config) -> list[str]:
    """Return a line for each setting of the job that is probably a mistake. Not collective."""
    warnings: list[str] = []
    first, fixed = _NO_THREADS_AT_THE_END
    if first <= tuple(sys.version_info[:3]) < fixed:
        warnings.append(
            "Python 3.12.0 to 3.12.2 starts no thread at the end of a program (CPython's issue"
            " 113964): end the checkpointer by `stop` or a `with` block, or a save that is still"
            " under way at the end is lost"
        )
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

    Each process is greeted by two others, however many there are: an address that others cannot
    reach would show only at a save or a loss.

    Args:
      process: (index, count) of this one.
      timeout_s: maximum duration of all of them together.
      on_failure: called by a thread of the probe with each neighbour that cannot be reached.
    """

    def __init__(
        self,
        peers: Peers,
        process: tuple[int, int],
        timeout_s: float,
        on_failure: Callable[[int, PeerUnreachable], None] | None = None,
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._on_failure = on_failure
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

    def finish(self) -> None:
        """Wait for the answers until the deadline.

        PeerUnreachable when one did not answer, or did not prove that it knows the run's secret.
        """
        for peer, thread in self._threads.items():
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
            silence = f"no answer within {self._timeout_s:g} s"
            no_answer = CheckpointError("greet", f"process {peer}", silence)
            error = self._errors.get(peer, no_answer)
            if error is not None:
                raise self._unreachable(peer, error)

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
        error = self._errors[peer]
        if error is not None and self._on_failure is not None:
            self._on_failure(peer, self._unreachable(peer, error))

    def _unreachable(self, peer: int, error: CheckpointError) -> PeerUnreachable:
        return PeerUnreachable(
            "start",
            f"process {peer} at {self._addresses.get(peer, 'an unknown address')}",
            f"it cannot be reached from this process: {error}",
            hint="set bind_host there to an address that the other hosts reach, and open its port"
            " (bind_port) between all hosts of the job",
        )


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

    def inspect(self, directory: str, create: Callable[[float], None] | None) -> Known:
        """Read the log; return what it knows of the run. Blocks for storage.

        Never raises, because RAM may be enough. ``create``: makes the directory until a deadline.
        """
        try:
            with told_of_wait(self._events, directory, self._deadline_s):
                if create is not None:
                    create(self._deadline_s)
                try:
                    self._writer.find(self._deadline_s)
                    self._tell_other_name(directory)
                except DirectoryInUse as error:
                    self._refusal = error if self._saves_there else None
                known = Known(*self._writer.known(self._deadline_s))
        except (PersistentTierError, CorruptData) as error:
            # Storage may be down just when RAM is needed; saves try it again.
            self._events.emit("persistent.problem", cause="unreachable", reason=str(error))
            self._failures.record(error)
            return Known(unread=str(error))
        self.has_read = True
        return known

    def _tell_other_name(self, directory: str) -> None:
        """Warn where this run had another name, because its directory had another path."""
        there = self._writer.table
        if there is not None and there.run_id != self._writer.run_id and there.from_dir:
            text = (
                f"{directory} had another path: run {there.run_id!r} saved there, and this is run"
                f" {self._writer.run_id!r}, for which what is in RAM under that name does not"
                f" count; set run_id={there.run_id!r} to restore it"
            )
            self._events.emit("warning", cause="setting", text=text)

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
            except DirectoryInUse:  # a PersistentTierError, too
                raise
            except (PersistentTierError, CorruptData) as error:
                self._events.emit(
                    "persistent.problem", cause="unreachable", reason=str(error)[:500]
                )
