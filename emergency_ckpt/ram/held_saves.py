"""The saves that the directories of a process hold, for all who read them.

Readers are peers, restores and tools. They name the shards of a save by the digest of its contents,
which several slots may have. While a reader is inside, no slot with the digest is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    HolderInventory,
    RestoredSave,
)
from emergency_ckpt.core.timeline import Timeline, number_of
from emergency_ckpt.errors import NotHeld, StepNotFound
from emergency_ckpt.ram.manifest import Published
from emergency_ckpt.ram.process_directory import ProcessDirectory, QuarantineRecord
from emergency_ckpt.ram.process_files import file_name, newest_chain, newest_stored
from emergency_ckpt.ram.slots import Slot, SlotMemory
from emergency_ckpt.ram.step_reader import DocumentCopy, RamStep, SlotCopy
from emergency_ckpt.types import Contents, SaveId, ShardEntry


class HeldSaves:
    """The saves and host states in a process's directory and in adopted ones. Thread-safe.

    ``_lock`` guards the tables and is never held during a long operation.
    """

    def __init__(
        self,
        own: ProcessDirectory,
        copy_threads: int,
        map_first: Callable[[Iterable[SlotMemory]], None],
    ) -> None:
        """``map_first``: maps memory for the devices' DMA in the background, before any other."""
        self._own = own
        self._orphans: list[ProcessDirectory] = []
        self._threads = copy_threads
        self._map_first = map_first
        self._compared: set[str] = set()  # digests that several slots have, which were verified
        self._lock = threading.RLock()

    def _directories(self) -> list[ProcessDirectory]:
        return [self._own, *self._orphans]

    @property
    def quarantined(self) -> tuple[QuarantineRecord, ...]:
        """Return the records of copies quarantined since the start, also by the scan."""
        with self._lock:
            return tuple(record for place in self._directories() for record in place.quarantined)

    def held(self) -> tuple[tuple[HeldTensors, ...], tuple[HeldHostState, ...], SaveId | None]:
        """Return published tensors, host states, and the newest save known as complete."""
        with self._lock:
            places = self._directories()
            tensors = {
                HeldTensors(save=published.save, digest=published.digest)
                for place in places
                for _, published in place.published()
            }
            complete_saves = [p.ledger.complete for p in places if p.ledger.complete is not None]
            host_states: dict[tuple[SaveId, int, int], HeldHostState] = {}
            for place in places:
                for host_state in place.host_states.held():
                    host_states.setdefault(
                        (host_state.save, host_state.owner, host_state.count), host_state
                    )
            # The chain of this process may exclude saves in directories of former processes.
            complete = max(
                complete_saves, key=lambda s: (not self._own.excludes(s), s), default=None
            )
        return tuple(sorted(tensors)), tuple(sorted(host_states.values())), complete

    def inventory(self, holder: str, process_index: int, address: str) -> HolderInventory:
        """Return what this process holds, as the ``holder`` that peers reach at ``address``."""
        tensors, host_states, known_complete = self.held()
        with self._lock:
            ledgers = [place.ledger for place in self._directories()]
        return HolderInventory(
            holder=holder,
            process_index=process_index,
            address=address,
            tensors=tensors,
            host_states=host_states,
            known_complete=known_complete,
            known_stored=newest_stored(ledgers),
            timeline=self.timeline,
            incarnation=self.incarnation,
        )

    @property
    def timeline(self) -> Timeline | None:
        """Return the newest timeline recorded in any of the directories, or None."""
        with self._lock:
            return newest_chain(place.ledger for place in self._directories())

    @property
    def incarnation(self) -> str:
        """Return the newest incarnation that any of the directories has heard of, or ""."""
        with self._lock:
            return max((p.ledger.incarnation for p in self._directories()), key=number_of)

    def restored(self) -> tuple[RestoredSave, ...]:
        """Return the saves that the newest lives began from, by the records here."""
        with self._lock:
            records = [place.ledger.restored for place in self._directories()]
        return tuple(record for record in records if isinstance(record, RestoredSave))

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        """Return the newest save known as complete, if its tensors are held. Does not block.

        Only all processes together know whether an older save is complete.
        """
        del deadline_s
        tensors, _, complete = self.held()
        return [] if complete not in {manifest.save for manifest in tensors} else [complete]

    def open_step(self, step: int, deadline_s: float | None = None) -> RamStep:
        """Return the parts that RAM has of the newest save of ``step``. StepNotFound."""
        del deadline_s
        with self._lock:
            places = self._directories()
            tensors, _, _ = self.held()
            save = max(
                (manifest.save for manifest in tensors if manifest.save.step == step), default=None
            )
            if save is None:
                where = f"it is not in {self._own.claim.path}"
                raise StepNotFound("open", f"step {step}", where)
            slots = [
                SlotCopy(
                    str(place.claim.path),
                    f"{place.claim.path}/{file_name(slot.number)}",
                    published.digest,
                    published.contents,
                    partial(self._bytes_of, published.digest),
                )
                for place in places
                for slot, published in place.published()
                if published.save == save
            ]
            documents = [
                DocumentCopy(
                    str(place.claim.path), host_state, partial(self._document, place, host_state)
                )
                for place in places
                for host_state in place.host_states.held()
                if host_state.save == save
            ]
        return RamStep(save, slots, documents)

    def _bytes_of(self, digest: str, entry: ShardEntry) -> npt.NDArray[np.uint8]:
        with self.mapping_for(digest) as (mapping, _):
            return np.array(mapping.view(entry.offset, entry.nbytes, self))

    def _document(self, place: ProcessDirectory, host_state: HeldHostState) -> bytes:
        data = place.host_states.read(host_state.save, host_state.owner, host_state.count)
        if data is None:
            raise NotHeld("read", f"host state of process {host_state.owner}", "it is gone")
        return data

    def contents(self, digest: str) -> Contents | None:
        """Return the contents published under a digest, or None."""
        with self._lock:
            pairs = self._slots_with(digest)
            return pairs[0][1].contents if pairs else None

    def contents_bytes(self, digest: str) -> bytes | None:
        """Return the canonical encoding whose SHA-256 is ``digest``, or None when not held."""
        with self._lock:
            pairs = self._slots_with(digest)
            return pairs[0][1].encoded if pairs else None

    @contextlib.contextmanager
    def mapping_for(self, digest: str) -> Generator[tuple[Mapping, Contents]]:
        """Give the slot's memory for reading; it is not reused meanwhile. NotHeld as ``reading``.

        Where several slots hold the digest, the slots are compared first: the bytes go to a peer,
        which would take all of these slots for damaged.
        """
        with self._lock:
            pairs = self._slots_with(digest)
            is_known = len(pairs) < 2 or digest in self._compared
        if not is_known:
            self.verify(digest, range(len(pairs[0][1].contents.shards)))
        with self._lock:
            if not is_known:
                self._compared.add(digest)
            (slot, *_), contents = self._whole_slots(digest)
            slot.readers += 1
            mapping = slot.mapping
        try:
            yield mapping, contents
        finally:
            with self._lock:
                slot.readers -= 1

    def verify(self, digest: str, shards: Sequence[int]) -> list[tuple[int, int]]:
        """Return (shard, CRC32C found) of each shard without a sound copy here.

        A sound copy has the CRC32C of capture time and is not quarantined. If several slots hold
        the digest, each is checked separately, and a damaged copy is not used again. Uses several
        threads and releases the GIL. NotHeld, also for a shard that is not in the contents.
        """
        with self._lock:
            slots, contents = self._whole_slots(digest)
            for slot in slots:
                slot.readers += 1
        try:
            unsound = {shard: _entry(contents, digest, shard) for shard in shards}
            crcs: dict[int, int] = {}
            for slot in slots:
                ranges = [(entry.offset, entry.nbytes) for entry in unsound.values()]
                slot_crcs = _native.crc32c_ranges(slot.mapping, ranges, self._threads)
                crcs = dict(zip(unsound, slot_crcs, strict=True))
                unsound = {
                    shard: entry
                    for shard, entry in unsound.items()
                    if crcs[shard] != entry.crc32c or shard in slot.bad_shards
                }
                with self._lock:
                    if slot.digest == digest:
                        slot.bad_shards.update(unsound)
                if not unsound:
                    break
        finally:
            with self._lock:
                for slot in slots:
                    slot.readers -= 1
        return [(shard, crcs[shard]) for shard in unsound]

    @contextlib.contextmanager
    def reading(self, digest: str) -> Generator[Callable[[int], npt.NDArray[np.uint8]]]:
        """Give a function that returns the bytes of a shard here, without a copy.

        They are a read-only uint8 array [nbytes], 64-byte aligned, of a copy that is not known to
        be damaged; the function raises NotHeld without one. Where slots are mapped for DMA, these
        are mapped before others, and the function waits until the shard's part is. No slot with
        the digest is written while inside. NotHeld when the digest is gone, or the files of all its
        slots were cut short. Thread-safe.
        """
        with self._lock:
            slots, contents = self._whole_slots(digest)
            for slot in slots:
                slot.readers += 1
            memories = [slot.wanted() for slot in slots]
        self._map_first(memories)

        def view(shard: int) -> npt.NDArray[np.uint8]:
            entry = _entry(contents, digest, shard)
            with self._lock:
                slot = _sound_slot(slots, digest, shard)
                if slot is None:  # a mended copy may have taken the place of these
                    slot = _sound_slot(self._whole_slots(digest)[0], digest, shard)
            if slot is None:
                raise NotHeld("read", f"shard {shard} of {digest[:12]}", "it is quarantined")
            return slot.view(entry.offset, entry.nbytes)

        try:
            with contextlib.ExitStack() as transfers:
                for slot in slots:
                    if not transfers.enter_context(slot.mapped.transfer()):
                        what = f"manifest {digest[:12]}"
                        raise NotHeld("read", what, "its slot is being given up")
                yield view
        finally:
            with self._lock:
                for slot in slots:
                    slot.readers -= 1

    def quarantine(self, digest: str, shard: int | None, detail: str) -> None:
        """Never use a copy again, and record the reason ``detail``.

        With a shard index, only that shard: ``reading`` refuses it, ``damaged`` names it,
        the others are still offered. With None the manifest is removed and its slot is free.
        For a digest that is not held only the record is written.
        """
        with self._lock:
            for place in self._directories():
                slots = [slot for slot in place.slots if slot.digest == digest]
                if not slots and place is not self._own:
                    continue
                for slot in slots:
                    if shard is None:
                        slot.unpublish()
                    else:
                        slot.bad_shards.add(shard)
                what = "manifest" if shard is None else f"shard {shard}"
                place.quarantine(
                    QuarantineRecord(
                        directory=str(place.claim.path),
                        name=what,
                        problem=detail[:1000],
                        digest=digest,
                        shard=shard,
                    )
                )

    def damaged(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of shards that failed verification in this life, by digest.

        Where several slots have a digest, those of the slot with the fewest.
        """
        with self._lock:
            slots = {
                published.digest: self._slots_with(published.digest)[0][0]
                for place in self._directories()
                for _, published in place.published()
            }
            return {
                d: tuple(sorted(slot.bad_shards)) for d, slot in slots.items() if slot.bad_shards
            }

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return the encoded document, or None when not held."""
        with self._lock:
            places = self._directories()
        for place in places:
            data = place.host_states.read(save, owner, count)
            if data is not None:
                return data
        return None

    def _slots_with(self, digest: str) -> list[tuple[Slot, Published]]:
        """Return the slots with a digest: whole files first, then the fewest damaged shards."""
        pairs = [
            (slot, published)
            for place in self._directories()
            for slot, published in place.published()
            if published.digest == digest
        ]
        return sorted(pairs, key=lambda pair: (pair[0].is_cut(), len(pair[0].bad_shards)))

    def _whole_slots(self, digest: str) -> tuple[list[Slot], Contents]:
        """Return the slots with a digest, at least one, whose files nobody cut short. NotHeld."""
        what, pairs = f"manifest {digest[:12]}", self._slots_with(digest)
        if not pairs:
            raise NotHeld("read", what, f"not held in {self._own.claim.path} (any more)")
        slots = [slot for slot, _ in pairs if not slot.is_cut()]
        if not slots:
            raise NotHeld("read", what, "somebody cut its slot short")
        return slots, pairs[0][1].contents


def _sound_slot(slots: Iterable[Slot], digest: str, shard: int) -> Slot | None:
    """Return the first slot that has the digest with a sound copy of ``shard``."""
    for slot in slots:
        if slot.digest == digest and shard not in slot.bad_shards:
            return slot
    return None


def _entry(contents: Contents, digest: str, shard: int) -> ShardEntry:
    if not 0 <= shard < len(contents.shards):
        raise NotHeld("read", f"shard {shard} of {digest[:12]}", "there is no such shard")
    return contents.shards[shard]
