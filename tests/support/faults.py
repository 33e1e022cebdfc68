"""Faults by name: each makes one part of the product fail, wait, or meet a bound.

Tests say what goes wrong; where in the product that is, only this file knows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from memory_coordination import MemoryService

from emergency_ckpt import start
from emergency_ckpt.cluster.shard_source import LoadedPart
from emergency_ckpt.core.save.snapshot_plan import Free
from emergency_ckpt.core.step_log import Table
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.extras import event_log
from emergency_ckpt.ram.slot_writer import MappedSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore import steps as step_catalog
from emergency_ckpt.state import host_state, snapshot, staging
from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage.array_writes import ArrayWrites
from emergency_ckpt.storage.log import StepLog
from emergency_ckpt.transfer import client


def event_log_retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a log that could not be written try again with the next event."""
    monkeypatch.setattr(event_log, "_RETRY_S", 0.0)


def event_log_waits(
    monkeypatch: pytest.MonkeyPatch, may_write: threading.Event, most_waiting: int
) -> None:
    """Hold each write of an event log until ``may_write``, and at most so many events meanwhile."""
    monkeypatch.setattr(event_log, "MAX_WAITING", most_waiting)
    append = event_log.LogFiles.append

    def append_later(files: event_log.LogFiles, *values: Any) -> Any:
        may_write.wait()
        return append(files, *values)

    monkeypatch.setattr(event_log.LogFiles, "append", append_later)


_LONG_S = 60.0
MOST_EVENTS_WAITING = event_log.MAX_WAITING


@contextmanager
def coordinated_by(service: MemoryService) -> Iterator[None]:
    """Let checkpointers of this process coordinate by ``service``, as its process 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "connect", lambda _: service.member(0))
        yield


def pieces_share_requests(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Let a client of transfers ask for at least so many bytes at once, where it needs as many."""
    monkeypatch.setattr(client, "MIN_REQUEST_BYTES", size_bytes)


class SlowStorage:
    """Storage that takes the tensors of a step only when told to go on, or fails then.

    Attributes:
      reached: set by the first save that is held up.
      go_on: to be set; no save is held up any more.
      fails: a save fails where it was held up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.fails = False
        write = PersistentTier.write_tensors

        def write_late(*args: Any, **kwargs: Any) -> None:
            self.reached.set()
            assert self.go_on.wait(_LONG_S)
            if self.fails:
                raise PersistentTierError("write", "tensors", "no space left")
            write(*args, **kwargs)

        monkeypatch.setattr(PersistentTier, "write_tensors", write_late)


class DeviceTransfers:
    """Shards that began to leave a device since they were last asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        start: Callable[..., Any] = staging._start_by_jax

        def counted(flights: Any, bound_bytes: int) -> None:
            start(flights, bound_bytes)
            self.count += sum(each.offset == 0 for each in flights)

        monkeypatch.setattr(staging, "_start_by_jax", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


class CopiesOnDevices:
    """Devices with room for copies, as CPU devices never say; counts the shards copied there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.count = 0
        make = snapshot.DeviceCopies.make

        def counted(self_: Any, sources: Any, needs: Any) -> Any:
            made = make(self_, sources, needs)
            self.count += sum(len(copies) for copies in (made or {}).values())
            return made

        monkeypatch.setattr(snapshot.DeviceCopies, "make", counted)
        monkeypatch.setattr(snapshot, "free_for_copies", lambda *_: Free(free_bytes, "as told"))

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def copies_to_slots_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each copy of shards into a slot fail as on a full device."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no space left on the device")

    monkeypatch.setattr(staging.Snapshot, "read_into", fail)


@contextmanager
def host_states_are_too_large() -> Iterator[None]:
    """Let saves fail behind their tensors: no host state has a document that is small enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_state, "MAX_HOST_STATE_BYTES", 0)
        yield


def shards_in_ram_look_damaged(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Let the first so many looks at shards in RAM find one that is damaged."""
    looks: list[Sequence[int]] = []
    for owner in (LocalTier, LoadedPart):
        verify: Callable[..., list[tuple[int, int]]] = owner.verify

        def find(self: Any, *args: Any, verify: Any = verify) -> list[tuple[int, int]]:
            looks.append(args[-1])
            return [(args[-1][0], 1)] if len(looks) <= times else verify(self, *args)

        monkeypatch.setattr(owner, "verify", find)


def listings_give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a listing of steps repeat calls to storage for half a second, not half an hour."""
    monkeypatch.setattr(step_catalog, "LISTING_TIMEOUT_S", 0.5)


def storage_fails(monkeypatch: pytest.MonkeyPatch, stage: str, *, once: bool = False) -> None:
    """Let a stage of each save to storage fail, or of the next one alone."""
    owner = DirectoryWriter if stage == "publish" else PersistentTier
    call_fails(monkeypatch, owner, stage, once=once)


def hidden_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storage stop answering between the version that lists a step and that of hidden ones."""
    append = StepLog.append

    def append_or_fail(log: StepLog, table: Table, deadline_s: float | None = None) -> object:
        if any(entry.state == "hidden" for entry in table.steps):
            error = PersistentTierError("write", log.target, "no answer in time")
            error.retryable = error.unreachable = True
            raise error
        return append(log, table, deadline_s)

    monkeypatch.setattr(StepLog, "append", append_or_fail)


def call_fails(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, once: bool = False
) -> None:
    """Let each call of a method fail as one of storage does, or the next one alone."""
    works, failed = getattr(owner, name), list[bool]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if once and failed:
            return works(*args, **kwargs)
        failed.append(True)
        raise PersistentTierError("save", "a step", "storage failed")

    monkeypatch.setattr(owner, name, fail)


def fill_disk(filler: Path) -> None:
    """Take all the room that is left on a file's disk."""
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def disk_fills_up_between_arrays(monkeypatch: pytest.MonkeyPatch, disk: Path) -> Callable[[], None]:
    """Fill the disk once some arrays of a step are stored; return the function that makes room."""
    return _fill_after_first(monkeypatch, ArrayWrites, "_write_batch", disk)


def disk_fills_up_between_chunks(monkeypatch: pytest.MonkeyPatch, disk: Path) -> Callable[[], None]:
    """Fill the disk once a chunk is in a slot; return the function that makes room."""
    return _fill_after_first(monkeypatch, MappedSink, "write", disk)


def _fill_after_first(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, disk: Path
) -> Callable[[], None]:
    work, filler, alone = getattr(owner, name), disk / "filler", threading.Lock()

    def work_and_fill(*args: Any) -> Any:
        with alone:
            result = work(*args)
            if not filler.exists():
                fill_disk(filler)
            return result

    monkeypatch.setattr(owner, name, work_and_fill)

    def make_room() -> None:
        monkeypatch.setattr(owner, name, work)
        filler.unlink()

    return make_room
