"""The bytes of a step in host memory, until storage has them: in a slot or the scratch area."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from emergency_ckpt import _native
from emergency_ckpt.background import copy_threads, new_memory
from emergency_ckpt.core.shard_layout import Layout
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.mapped import Pin, Pins
from emergency_ckpt.state.staging import HostShard, Landed, LandingPlace, Snapshot, flat_bytes
from emergency_ckpt.types import LeafSpec, SaveId, ShardId

if TYPE_CHECKING:
    from emergency_ckpt.events import EventSink
    from emergency_ckpt.ram.tier import LocalTier
    from emergency_ckpt.save.value_checks import FiniteLeaves


class SlotCapture:
    """The snapshot that the local save of a step reads, once for both tiers.

    The local save pins its slot for the persistent save, if the persistent save wants the bytes.
    When the local save ends without having read (no slot is free, RAM has the step already, the
    save is dropped), the persistent save reads the snapshot itself. The snapshot is closed when
    neither save needs it any more.

    Attributes:
      is_wanted: the persistent save still wants the bytes.
    """

    def __init__(
        self, snapshot: Snapshot, shards: Sequence[ShardId] = (), *, is_wanted: bool = False
    ) -> None:
        """Share ``snapshot``, of ``shards`` in this order."""
        self.snapshot = snapshot
        self.shards = tuple(shards)
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self.is_wanted = is_wanted
        self._is_read = False
        self._copied: tuple[Pin, dict[ShardId, HostShard]] | None = None

    # The local save.

    def read_into(self, target: LandingPlace) -> Iterator[list[Landed]]:
        """As ``Snapshot.read_into``."""
        self._is_read = True
        return self.snapshot.read_into(target)

    def hand_over(
        self, pin: Pin, leaves: Sequence[LeafSpec], layout: Layout, crcs: Sequence[int]
    ) -> None:
        """Give the slot's bytes and ``pin`` to the persistent save, if that still wants them."""
        with self._lock:
            if not self.is_wanted:
                pin.end()
                return
            places = [
                (place.shard, place.offset, place.nbytes, crc)
                for place, crc in zip(layout.shards, crcs, strict=True)
            ]
            self._copied = pin, _shards_of(pin, leaves, places)
        self._settled.set()

    def close(self) -> None:
        """End the part of the local save, whether the save has read or not. Idempotent."""
        with self._lock:
            self._settled.set()
            if self._is_read or not self.is_wanted:
                self.snapshot.close()

    # The persistent save.

    def take(self, timeout_s: float) -> tuple[Pin, dict[ShardId, HostShard]] | None:
        """Return the pin of the slot and the shards in it; None when the snapshot is unread.

        The caller ends the pin. Waits for the local save; raises SaveFailed when that save began to
        read and failed, or takes longer than ``timeout_s``.
        """
        if not self._settled.wait(timeout_s):
            raise SaveFailed(
                "read", "snapshot", f"the local save has not read it in {timeout_s:g} s"
            )
        with self._lock:
            copied, self._copied = self._copied, None
            if copied is None and self._is_read:
                raise SaveFailed("read", "snapshot", "the local save failed while it read it")
            return copied

    def release(self) -> None:
        """Note that the persistent save needs the bytes no more. Idempotent."""
        with self._lock:
            self.is_wanted = False
            copied, self._copied = self._copied, None
            if self._settled.is_set():
                self.snapshot.close()
        if copied is not None:
            copied[0].end()


def _shards_of(
    pin: Pin, leaves: Iterable[LeafSpec], places: Iterable[tuple[ShardId, int, int, int]]
) -> dict[ShardId, HostShard]:
    """Return the shards in a pinned slot, from (shard, offset, nbytes, CRC32C) of each."""
    specs = {leaf.path: leaf for leaf in leaves}
    return {
        shard: HostShard.of_bytes(pin.view(offset, nbytes), specs[shard.leaf], shard.box, crc)
        for shard, offset, nbytes, crc in places
    }


class PublishedCapture:
    """The shards that one process writes, from its slot, of a step that RAM has had for a while.

    The devices are not read. For the background thread.
    """

    def __init__(
        self, tier: LocalTier, save: SaveId, leaves: Sequence[LeafSpec], shards: Iterable[ShardId]
    ) -> None:
        """``leaves``: of the whole state. ``shards``: those that this process writes."""
        self._tier = tier
        self._save = save
        self._leaves = {leaf.path: leaf for leaf in leaves}
        self._shards = frozenset(shards)
        self._pin: Pin | None = None

    def load(self) -> Mapping[ShardId, HostShard]:
        """Pin the slot and return its shards, after a check that each still has its CRC32C.

        NotHeld, SaveFailed.
        """
        if not self._shards:
            return {}
        target = f"step {self._save.step} in RAM"
        mapping, self._pin, contents = self._tier.pin(self._save)
        if {leaf.path: leaf for leaf in contents.leaves} != self._leaves:
            raise SaveFailed("read", target, "the state has other leaves by now")
        entries = {contents.shard_id(index): entry for index, entry in enumerate(contents.shards)}
        if lacking := sorted(self._shards - entries.keys()):
            raise SaveFailed("read", target, f"the slot of this process lacks {lacking[0]}")
        ranges = [(entry.offset, entry.nbytes) for entry in entries.values()]
        crcs = _native.crc32c_ranges(mapping, ranges, copy_threads())
        for (shard, entry), crc in zip(entries.items(), crcs, strict=True):
            if crc != entry.crc32c:
                raise SaveFailed("read", target, f"shard {shard} was changed since its capture")
        return _shards_of(
            self._pin,
            contents.leaves,
            (
                (shard, entry.offset, entry.nbytes, entry.crc32c)
                for shard, entry in entries.items()
                if shard in self._shards
            ),
        )

    def close(self, *, is_written: bool = False) -> None:
        """Release the slot; as ``StorageCapture.close``."""
        if self._pin is not None and is_written:
            self._pin.end()
        self._pin = None


_MOST_AREAS = 2
"""One area for the next save, and one that a write which was given up may still read."""


class ScratchArea:
    """Memory of one process outside of its ramdisk. Thread-safe.

    The area grows to the largest save, and is kept: new pages cost ten times the copy. Pages that
    no save has written cost nothing. While storage may still read the area for a save that was
    given up, the next save gets a second area. A third is refused, so that a storage that hangs
    cannot take all memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._areas: list[tuple[_native.Mapping, Pins]] = []
        """The last area is for the next save; storage may still read the areas before it."""

    def borrow(self, nbytes: int) -> tuple[_native.Mapping, Pin]:
        """Return at least ``nbytes`` of memory, for one save alone until the pin ends.

        SaveFailed: storage may still read all areas, or the system has no memory.
        """
        with self._lock:
            if self._used() >= _MOST_AREAS:
                gc.collect()  # views of failed saves may be in cycles
                if self._used() >= _MOST_AREAS:
                    raise SaveFailed(
                        "borrow",
                        f"{nbytes} bytes of memory",
                        "storage still reads the memory of earlier saves, which were given up",
                        hint="find out why storage does not answer",
                    )
            *read, (mapping, pins) = self._areas or [(_new_memory(nbytes), Pins())]
            if pins.count():
                read.append((mapping, pins))
                mapping, pins = _new_memory(nbytes), Pins()
            elif mapping.size_bytes < nbytes:
                mapping = _new_memory(nbytes)
            self._areas = [*read, (mapping, pins)]
            return mapping, pins.pin(mapping)

    def release(self) -> None:
        """Return the memory to the system once no view of it is alive."""
        with self._lock:
            self._areas = []

    def _used(self) -> int:
        """Return how many areas are still read; forget the other areas, except the last."""
        read = [area for area in self._areas[:-1] if area[1].count()]
        self._areas = [*read, *self._areas[-1:]]
        return sum(pins.count() > 0 for _, pins in self._areas)


def _new_memory(nbytes: int) -> _native.Mapping:
    size_bytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
    try:
        return new_memory("eckpt-capture", size_bytes)
    except OSError as error:
        raise SaveFailed("make", f"{size_bytes} bytes of memory", str(error)) from error


class StorageCapture:
    """The shards that one process writes in one persistent save. For the background thread.

    1. The shards that the local save of the step has in its slot are written from that slot, which
       is pinned. They are copied to the scratch area first if local saves would otherwise have too
       few slots: when storage may still read another slot for a save that was given up, or when the
       ramdisk had no room for one more.
    2. The other shards are copied into the scratch area at once, through the staging memory. This
       applies on CPU too: if a donated state is still being read, XLA copies the state into new
       memory within the step.
    """

    def __init__(
        self,
        tier: LocalTier,
        scratch: ScratchArea,
        events: EventSink,
        finite: FiniteLeaves,
        step: int,
        specs: Mapping[str, LeafSpec],
        layout: Layout,
        snapshot: Snapshot,
        shards: Sequence[ShardId],
        shared: SlotCapture | None,
        *,
        patience_s: float,
        batch_bytes: int,
    ) -> None:
        """``snapshot`` is of ``shards``, those that ``shared`` lacks; ``layout`` is of all.

        ``scratch``: memory for the shards that no slot has, one for all captures of a process.
        """
        self._tier = tier
        self._scratch = scratch
        self._events = events
        self._finite = finite
        self._step = step
        self._specs = specs
        self._size_bytes = layout.size_bytes
        self._places = {placed.shard: placed for placed in layout.shards}
        self._snapshot = snapshot
        self._shards = shards
        self._shared = shared
        self._patience_s = patience_s
        self._batch_bytes = batch_bytes
        self._borrowed: tuple[_native.Mapping, Pin] | None = None
        self._captured: dict[ShardId, HostShard] = {}
        self._pins: list[Pin] = []
        self._error: Exception | None = None

    def read(self) -> None:
        """Read all shards into host memory at once, since training may wait; never raises."""
        started_s = time.monotonic()
        try:
            source = self._read()
        except Exception as error:  # noqa: BLE001 - raised by ``load``, in a stage of the save
            self._error = error
            return
        self._events.emit(
            "persistent.stage",
            stage="captured",
            step=self._step,
            size_bytes=sum(shard.view.nbytes for shard in self._captured.values()),
            source=source,
            seconds=time.monotonic() - started_s,
        )

    def load(self) -> Mapping[ShardId, HostShard]:
        """Return the shards, after ``read``. Raises the error that stopped ``read``."""
        if self._error is not None:
            raise self._error
        return self._captured

    def close(self, *, is_written: bool = False) -> None:
        """Release everything. Idempotent.

        ``is_written``: nothing reads the memory any more. Otherwise a write that was given up may
        still read the memory, which is used again when no view of it is alive.
        """
        self._snapshot.close()
        if self._shared is not None:
            self._shared.release()
        if is_written:
            for pin in self._pins:
                pin.end()
        self._captured, self._pins, self._borrowed, self._error = {}, [], None, None

    def _read(self) -> str:
        sources = [self._take(self._snapshot, self._shards)] if self._shards else []
        if self._shared is not None:
            copied = self._shared.take(self._patience_s)
            if copied is None:
                sources.append(self._take(self._shared.snapshot, self._shared.shards))
            elif self._tier.may_stay_pinned():
                pin, shards = copied
                self._captured.update(shards)
                self._pins.append(pin)
                sources.append("slot")
            else:
                sources.append(self._copy_out(*copied))
        return " and ".join(dict.fromkeys(sources))

    def _take(self, snapshot: Snapshot, shards: Sequence[ShardId]) -> str:
        """Read ``snapshot``, of ``shards``, into the scratch area."""
        mapping, _ = self._area()
        target = LandingPlace(
            mapping,
            [self._places[shard].offset for shard in shards],
            patterns=self._finite.patterns(shards, self._specs),
            batch_bytes=self._batch_bytes,
        )
        counts: dict[ShardId, int] = {}
        for landed in snapshot.read_into(target):
            self._note([(shards[position], crc) for position, crc, _ in landed])
            counts.update({shards[position]: count for position, _, count in landed})
        self._finite.note(self._step, counts)
        return "scratch"

    def _copy_out(self, pin: Pin, copied: Mapping[ShardId, HostShard]) -> str:
        """Copy the shards in the slot of ``pin`` into the scratch area."""
        mapping, _ = self._area()
        copies = [
            (flat_bytes(host_shard.view), self._places[shard].offset)
            for shard, host_shard in copied.items()
        ]
        crcs = _native.copy_crc32c(mapping, copies, copy_threads())
        for (shard, host_shard), crc in zip(copied.items(), crcs, strict=True):
            if crc != host_shard.crc32c:
                raise SaveFailed("copy", f"shard {shard}", "its slot was changed since its capture")
        self._note([(shard, host_shard.crc32c) for shard, host_shard in copied.items()])
        pin.end()
        return "scratch"

    def _area(self) -> tuple[_native.Mapping, Pin]:
        if self._borrowed is None:
            self._borrowed = self._scratch.borrow(self._size_bytes)
            self._pins.append(self._borrowed[1])
        return self._borrowed

    def _note(self, crcs: Sequence[tuple[ShardId, int]]) -> None:
        """Note (shard, CRC32C) of shards that are in the scratch area."""
        _, pin = self._area()
        for shard, crc in crcs:
            memory = pin.view(self._places[shard].offset, self._places[shard].nbytes)
            spec = self._specs[shard.leaf]
            self._captured[shard] = HostShard.of_bytes(memory, spec, shard.box, crc)
