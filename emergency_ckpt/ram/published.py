"""Read access to the contents of process directories, by digest, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from absl import logging

from emergency_ckpt import _native, files
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import SMALL_FILES_BYTES
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
from emergency_ckpt.core.timeline import Timeline, newest, number_of
from emergency_ckpt.errors import NotHeld, StepNotFound
from emergency_ckpt.ram import locks as claims
from emergency_ckpt.ram.memory_groups import new_pages_fit
from emergency_ckpt.ram.process_directory import ProcessDirectory, QuarantineRecord
from emergency_ckpt.ram.process_files import Published, file_name
from emergency_ckpt.ram.slot_choice import SlotState
from emergency_ckpt.ram.slots import Slot
from emergency_ckpt.ram.step_reader import DocumentCopy, RamStep, SlotCopy
from emergency_ckpt.types import LOCAL, Contents, SaveId, ShardEntry, TierName


class HeldCopies:
    """The copies in a process's own directory and in adopted orphans. Base of ``LocalTier``.

    ``_lock`` guards the tables of both classes and is never held during a long operation.
    """

    name: TierName = LOCAL

    def __init__(self, own: ProcessDirectory, copy_threads: int, slots_at_rest: int) -> None:
        self._slots_at_rest = slots_at_rest
        self._own = own
        self._orphans: list[ProcessDirectory] = []
        self._threads = copy_threads
        self._document_bytes = 0
        self._compared: set[str] = set()  # digests that several slots have, which were verified
        self._lock = threading.RLock()

    @property
    def quarantined(self) -> tuple[QuarantineRecord, ...]:
        """Return the records of copies quarantined since ``open``, also by the scan."""
        with self._lock:
            return tuple(record for place in self._directories() for record in place.quarantined)

    def held(self) -> tuple[tuple[HeldTensors, ...], tuple[HeldHostState, ...], SaveId | None]:
        """Return published tensors, host states, and the newest save known as complete. Cached."""
        with self._lock:
            places = self._directories()
            tensors = {
                HeldTensors(save=slot.published.save, digest=slot.published.digest)
                for place in places
                for slot in place.published()
                if slot.published is not None
            }
            known = [p.ledger.complete for p in places if p.ledger.complete is not None]
            host_states: dict[tuple[SaveId, int, int], HeldHostState] = {}
            for place in places:
                for held in place.host_states.held():
                    host_states.setdefault((held.save, held.owner, held.count), held)
            # Orphans may have been left behind by the chain of this process.
            complete = max(known, key=lambda s: (not self._own.excludes(s), s), default=None)
        return tuple(sorted(tensors)), tuple(sorted(host_states.values())), complete

    def inventory(self, holder: str, process_index: int, address: str) -> HolderInventory:
        """Return what this process holds, as the ``holder`` that peers reach at ``address``."""
        tensors, host_states, known_complete = self.held()
        return HolderInventory(
            holder=holder,
            process_index=process_index,
            address=address,
            tensors=tensors,
            host_states=host_states,
            known_complete=known_complete,
            timeline=self.timeline,
            incarnation=self.incarnation,
        )

    @property
    def timeline(self) -> Timeline | None:
        """Return the newest timeline recorded in any of the directories, or None."""
        with self._lock:
            return newest(*(place.ledger.chain for place in self._directories()))

    @property
    def incarnation(self) -> str:
        """Return the newest incarnation that any of the directories has heard of, or ""."""
        with self._lock:
            return max((p.ledger.incarnation for p in self._directories()), key=number_of)

    def note_incarnation(self, incarnation: str) -> None:
        """Record that the job has begun a life. A failure is logged: later records have it too."""
        with self._lock:
            self._own.note_incarnation(incarnation)

    def follow(self, timeline: Timeline) -> None:
        """Record ``timeline``; see ``ProcessDirectory.follow``. LocalTierError."""
        self._change_all("follow a timeline in", lambda place: place.follow(timeline))

    def release_orphans(self) -> None:
        """Delete the adopted directories; release those that a reader serves.

        Views and readers keep their memory alive.
        """
        with self._lock:
            while self._orphans:
                orphan = self._orphans.pop()
                if not orphan.delete():
                    logging.info("%s is still being served; it stays", orphan.claim.path)

    def contents(self, digest: str) -> Contents | None:
        """Return the contents published under a digest, or None."""
        with self._lock:
            found = self._find(digest)
            return found[1].contents if found else None

    def contents_bytes(self, digest: str) -> bytes | None:
        """Return the canonical encoding whose SHA-256 is ``digest``, or None when not held."""
        with self._lock:
            found = self._find(digest)
            return found[1].encoded if found else None

    @contextlib.contextmanager
    def mapping_for(self, digest: str) -> Generator[tuple[Mapping, Contents]]:
        """Lend the slot's memory for reading; it is not reused meanwhile. NotHeld when gone.

        Where several slots hold the digest they are compared first: what is lent goes to a peer,
        which would hold all of them for damaged.
        """
        with self._lock:
            found = self._found(digest)
            is_known = len(found) < 2 or digest in self._compared
        if not is_known:
            self.verify(digest, range(len(found[0][1].contents.shards)))
        with self._lock:
            if not is_known:
                self._compared.add(digest)
            slot, published = self._held_slot(digest)
            if slot.is_cut():
                raise NotHeld("read", f"slot {slot.number}", "somebody cut its file short")
            slot.readers += 1
            mapping = slot.mapping
        try:
            yield mapping, published.contents
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
            _, published = self._held_slot(digest)
            slots = [slot for slot, _ in self._found(digest) if not slot.is_cut()]
            if not slots:
                raise NotHeld("verify", f"manifest {digest[:12]}", "somebody cut its slot short")
            for slot in slots:
                slot.readers += 1
        try:
            left = {shard: _entry(published.contents, digest, shard) for shard in shards}
            crcs: dict[int, int] = {}
            for slot in slots:
                ranges = [(entry.offset, entry.nbytes) for entry in left.values()]
                found = _native.crc32c_ranges(slot.mapping, ranges, self._threads)
                crcs = dict(zip(left, found, strict=True))
                left = {
                    shard: entry
                    for shard, entry in left.items()
                    if crcs[shard] != entry.crc32c or shard in slot.bad_shards
                }
                with self._lock:
                    if _digest_of(slot) == digest:
                        slot.bad_shards.update(left)
                if not left:
                    break
        finally:
            with self._lock:
                for slot in slots:
                    slot.readers -= 1
        return [(shard, crcs[shard]) for shard in left]

    def lend(self, digest: str, shard: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] over a shard's memory, 64-byte aligned, no copy.

        The slot is not written while this array, or an array made from it without a copy (JAX
        on CPU), is alive, also after ``close``. NotHeld when gone or quarantined.
        """
        with self._lock:
            slot, published = self._held_slot(digest, shard)
            entry = _entry(published.contents, digest, shard)
            if shard in slot.bad_shards:
                raise NotHeld("lend", f"shard {shard} of {digest[:12]}", "it is quarantined")
            return slot.lend(entry.offset, entry.nbytes)

    def has_room_to_lend(self) -> bool:
        """Return True when a third slot has room, so that saves continue while one is lent.

        Counts every process of the run on this ramdisk, since all restore at the same time.
        """
        return self._has_room(self._slots_at_rest + 1)

    def _has_room(self, wanted: int) -> bool:
        """Return True when ramdisk and memory limit have room for ``wanted`` slots, not lent."""
        with self._lock:
            slots, dir_fd = list(self._own.slots), self._own.claim.dir_fd
            largest = max((slot.size_bytes for slot in slots), default=0)
            missing = max(wanted - sum(not slot.lent for slot in slots), 0)
            holes = sum(slot.size_bytes for slot in slots if not slot.reserved)
            free = files.free_bytes(dir_fd)
        processes = max(len(claims.process_directories(self._own.claim.path.parent)), 1)
        documents = self._missing_document_bytes()
        needed = processes * (missing * largest + holes + documents + SMALL_FILES_BYTES)
        return needed <= free and new_pages_fit(self._own.claim.path, needed)[0]

    def _missing_document_bytes(self) -> int:
        """Return the room that host states of saves to come take beside those that are here."""
        with self._lock:
            by_save: Counter[SaveId] = Counter()
            for held in self._own.host_states.held():
                by_save[held.save] += held.size_bytes
            each = max([self._document_bytes, *by_save.values()])
            return max(self._slots_at_rest * each - by_save.total(), 0)

    def quarantine(self, digest: str, shard: int | None, detail: str) -> None:
        """Never use a copy again, and record the reason ``detail``.

        With a shard index, only that shard: ``lend`` refuses it, ``quarantined_shards`` names it,
        the others are still offered. With None the manifest is removed and its slot is free. For a
        digest that is not held only the record is written.
        """
        with self._lock:
            for place in self._directories():
                slots = [slot for slot in place.published() if _digest_of(slot) == digest]
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

    def complete_steps(self, deadline_s: float | None = None) -> list[SaveId]:
        """Return the newest save known as complete, if its tensors are held. Does not block.

        Of older ones that are held only all processes together know.
        """
        del deadline_s
        tensors, _, complete = self.held()
        return [] if complete not in {held.save for held in tensors} else [complete]

    def open_step(self, step: int) -> RamStep:
        """Return the parts of ``step`` that are held, of its newest save. StepNotFound."""
        with self._lock:
            places = self._directories()
            tensors, _, _ = self.held()
            save = max((held.save for held in tensors if held.save.step == step), default=None)
            if save is None:
                where = f"it is not in {self._own.claim.path}"
                raise StepNotFound("open", f"step {step}", where)
            slots = [
                SlotCopy(
                    str(place.claim.path),
                    f"{place.claim.path}/{file_name(slot.number)}",
                    slot.published.digest,
                    slot.published.contents,
                    partial(self._bytes_of, slot.published.digest),
                )
                for place in places
                for slot in place.published()
                if slot.published is not None and slot.published.save == save
            ]
            documents = [
                DocumentCopy(str(place.claim.path), held, partial(self._document, place, held))
                for place in places
                for held in place.host_states.held()
                if held.save == save
            ]
        return RamStep(save, slots, documents)

    def _bytes_of(self, digest: str, entry: ShardEntry) -> npt.NDArray[np.uint8]:
        with self.mapping_for(digest) as (mapping, _):
            return np.array(mapping.view(entry.offset, entry.nbytes, self))

    def _document(self, place: ProcessDirectory, held: HeldHostState) -> bytes:
        data = place.host_states.read(held.save, held.owner, held.count)
        if data is None:
            raise NotHeld("read", f"host state of process {held.owner}", "it is gone")
        return data

    def remove(self, step: int, incarnation: str = "") -> None:
        """Unpublish every save of ``step``, protected or not, with its host states.

        Also in orphans; see ``ProcessDirectory.remove``. LocalTierError.

        ``incarnation``: of no account.
        """
        del incarnation
        self._change_all("remove from", lambda place: place.remove(step))

    def invalidate_newer(self, than: SaveId, timeline: Timeline | None = None) -> None:
        """Unpublish saves later than the restored ``than``, here and in orphans. LocalTierError.

        Later means a greater step, or the same step of another incarnation; see
        ``ProcessDirectory.invalidate_newer``.
        """
        self._change_all("invalidate in", lambda place: place.invalidate_newer(than, timeline))

    def _change_all(self, operation: str, change: Callable[[ProcessDirectory], None]) -> None:
        """Apply ``change`` to this process's directory and to orphans. LocalTierError."""
        with self._lock:
            for place in self._directories():
                try:
                    change(place)
                except OSError as error:
                    raise files.local_error(operation, str(place.claim.path), error) from error

    def note_incomplete(self, save: SaveId) -> None:
        """Note that ``save`` is not whole on all processes: its slot is the next to be used."""
        with self._lock:
            for slot in self._own.published():
                if slot.published is not None and slot.published.save == save:
                    slot.whole = False

    def incomplete(self) -> set[SaveId]:
        """Return the saves held here of which ``note_incomplete`` was told."""
        with self._lock:
            slots = [slot.published for slot in self._own.slots if slot.whole is False]
        return {published.save for published in slots if published is not None}

    def keep_only(self, save: SaveId, digest: str) -> None:
        """Unpublish the slots of ``save`` except ``digest``, which has all shards needed here.

        Does nothing when ``digest`` is not published. Memory being read or lent stays valid.
        """
        with self._lock:
            slots = [
                slot
                for slot in self._own.slots
                if slot.published is not None and slot.published.save == save
            ]
            if any(_digest_of(slot) == digest for slot in slots):
                for slot in slots:
                    if _digest_of(slot) != digest:
                        slot.unpublish()

    def quarantined_shards(self, digest: str) -> frozenset[int]:
        """Return the indices of a manifest's shards that failed verification in this life."""
        with self._lock:
            found = self._find(digest)
            return frozenset(found[0].bad_shards) if found else frozenset()

    def damaged(self) -> dict[str, tuple[int, ...]]:
        """Return ``quarantined_shards`` of each manifest that has some."""
        digests = {held.digest for held in self.held()[0]}
        found = {digest: tuple(sorted(self.quarantined_shards(digest))) for digest in digests}
        return {digest: shards for digest, shards in found.items() if shards}

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return the encoded document, or None when not held."""
        with self._lock:
            places = self._directories()
        for place in places:
            data = place.host_states.read(save, owner, count)
            if data is not None:
                return data
        return None

    def _slot_states(self) -> list[SlotState]:
        return [
            SlotState(
                number=slot.number,
                save=slot.published.save if slot.published else None,
                lent=slot.lent,
                in_use=slot.writing or slot.readers > 0,
                incomplete=slot.whole is False,
                excluded=slot.published is not None and self._own.excludes(slot.published.save),
            )
            for slot in self._own.slots
        ]

    def _in_use(self, slot: Slot) -> bool:
        return slot.lent or slot.writing or slot.readers > 0

    def _mappings(self, newest_only: bool) -> list[tuple[Mapping, bool]]:
        """The memory of own slots, and whether its pages were written before they were opened."""
        with self._lock:
            slots = [slot for slot in self._own.slots if slot.reserved]
            if newest_only and slots:
                saves = {
                    slot.published.save: slot
                    for slot in slots
                    if slot.published is not None and not self._own.excludes(slot.published.save)
                }
                slots = [saves[max(saves)] if saves else max(slots, key=lambda s: s.size_bytes)]
            return [(slot.mapping, slot.written) for slot in slots]

    def _directories(self) -> list[ProcessDirectory]:
        return [self._own, *self._orphans]

    def _found(self, digest: str) -> list[tuple[Slot, Published]]:
        """Return the slots with a digest, those with the fewest damaged shards first."""
        found = [
            (slot, slot.published)
            for place in self._directories()
            for slot in place.published()
            if slot.published is not None and slot.published.digest == digest
        ]
        return sorted(found, key=lambda pair: len(pair[0].bad_shards))

    def _find(self, digest: str) -> tuple[Slot, Published] | None:
        return next(iter(self._found(digest)), None)

    def _held_slot(self, digest: str, shard: int | None = None) -> tuple[Slot, Published]:
        """Return a slot with the digest, preferably with a sound copy of ``shard``. NotHeld."""
        found = self._found(digest)
        if not found:
            raise NotHeld(
                "read", f"manifest {digest[:12]}", f"not held in {self._own.claim.path} (any more)"
            )
        sound = (pair for pair in found if shard not in pair[0].bad_shards)
        return next(sound, found[0])


def _digest_of(slot: Slot) -> str | None:
    return slot.published.digest if slot.published else None


def _entry(contents: Contents, digest: str, shard: int) -> ShardEntry:
    if not 0 <= shard < len(contents.shards):
        raise NotHeld("read", f"shard {shard} of {digest[:12]}", "there is no such shard")
    return contents.shards[shard]
