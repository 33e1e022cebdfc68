"""The local tier: the slots and host states of one process on its host's ramdisk.

See FORMAT.md for the files. One thread at a time may save (``reserve``, ``begin_write``); all other
methods are thread-safe. Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from absl import logging

from emergency_ckpt import files
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, SMALL_FILES_BYTES
from emergency_ckpt.core.restore.suspect import RestoredSave
from emergency_ckpt.errors import CheckpointError, LocalTierError, RamdiskFull, SlotBusy
from emergency_ckpt.ram import locks as claims
from emergency_ckpt.ram.old_lives import claim_or_wait
from emergency_ckpt.ram.other_runs import OtherRuns
from emergency_ckpt.ram.prefault import Prefaulter
from emergency_ckpt.ram.process_directory import ProcessDirectory
from emergency_ckpt.ram.published import HeldCopies
from emergency_ckpt.ram.signatures import Signer
from emergency_ckpt.ram.slot_choice import (
    SLOTS_AT_REST,
    SlotChoice,
    StorageSource,
    choose_slot,
    choose_storage_source,
    least_needed,
    surplus_slots,
)
from emergency_ckpt.ram.slot_writer import SlotWriter
from emergency_ckpt.ram.slots import Slot, check_room, whole_pages
from emergency_ckpt.types import SaveId, Writer

__all__ = ["LocalTier", "SlotWriter"]

_CLOSE_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class LocalTier(HeldCopies):
    """Slots and host states of one process; see the module. Made by ``open``."""

    def __init__(
        self,
        own: ProcessDirectory,
        run_dir: Path,
        writer: Writer,
        *,
        copy_threads: int,
        slots: int = SLOTS_AT_REST,
        start: str = "",
        other_runs: OtherRuns | None = None,
        keeps_finite: bool = False,
    ) -> None:
        super().__init__(own, copy_threads, slots)
        self._other_runs = other_runs or OtherRuns(run_dir.parent, run_dir.name)
        self._start = start
        self._run_dir = run_dir
        self._writer = writer
        self._protected: frozenset[SaveId] = frozenset(
            slot.published.save for slot in own.published() if slot.published is not None
        )
        self._keeps_finite = keeps_finite
        self._reserved_bytes = 0
        self._spare_slots = 0
        # Serialises long operations, so that _lock is never held for long.
        self._saving = threading.Lock()
        self._closing = threading.Event()
        self._prefaulter = Prefaulter(str(self.path), self.reserve, self._mappings, copy_threads)

    @classmethod
    def open(
        cls,
        local_dir: Path,
        run_id: str,
        writer: Writer,
        *,
        host_state_limit_bytes: int = MAX_HOST_STATE_BYTES,
        copy_threads: int,
        slots: int = SLOTS_AT_REST,
        start: str = "",
        wait_s: float = 0.0,
        other_runs: OtherRuns | None = None,
        signer: Signer | None = None,
        keeps_finite: bool = False,
    ) -> LocalTier:
        """Claim ``<local_dir>/<run_id>/<process directory>/`` and scan what it holds.

        Takes the directory named for ``writer.process_index``, else any of this run that no live
        process owns, else makes one. Waits up to ``wait_s`` seconds for a directory that a process
        of another ``start`` holds. Damaged files are quarantined, never raised. Until the first
        ``protect`` or ``note_complete`` every save found is protected. ``slots``: number of slots
        at rest, one more than the complete steps to keep. ``signer``: signs published files;
        unsigned files are then not used. ``keeps_finite``: see ``pinned``.

        ConfigError for an invalid run id; LocalTierError when the ramdisk cannot be used, or an
        earlier life of the run still holds it. The claim ends with ``close`` or with the process.
        """
        claims.check_run_id(run_id)
        claim = claim_or_wait(
            lambda: claims.claim_directory(local_dir, run_id, writer.process_index, start),
            run_id,
            wait_s,
        )
        try:
            own = ProcessDirectory(claim, run_id, host_state_limit_bytes, signer)
        except OSError as error:
            claim.release()
            raise files.local_error("open", str(claim.path), error) from error
        return cls(
            own,
            local_dir / run_id,
            writer,
            copy_threads=copy_threads,
            slots=slots,
            start=start,
            other_runs=other_runs,
            keeps_finite=keeps_finite,
        )

    @property
    def path(self) -> Path:
        """This process's directory."""
        return self._own.claim.path

    def note_slice(self, slice_index: int) -> None:
        """Name this slice in the manifests published from now on."""
        self._writer = msgspec.structs.replace(self._writer, slice_index=slice_index)

    def is_intact(self) -> bool:
        """Return True when no program has removed the directory or a slot."""
        with self._lock:
            own = self._own
            return own.claim.is_in_place() and all(slot.is_in_place() for slot in own.slots)

    def adopt_orphans(self, wait_s: float = 0.0) -> None:
        """Lock the directories of this run that no process owns, and offer their contents too.

        Call it when all processes of the job have claimed their directories. Adopted directories
        are never written. Waits up to ``wait_s`` seconds for processes of another start;
        LocalTierError when one still holds a directory.
        """
        self._check_open("adopt orphans beside")
        for path in claims.process_directories(self._run_dir):
            if path == self._own.claim.path:
                continue
            try:
                claim = claim_or_wait(
                    partial(claims.claim_existing, path, self._start), self._run_dir.name, wait_s
                )
                if claim is None:
                    continue
                orphan = self._own.sibling(claim)
            except OSError as error:
                raise files.local_error("adopt", str(path), error) from error
            with self._lock:
                self._orphans.append(orphan)

    def expect_documents(self, nbytes: int) -> None:
        """Count on ``nbytes`` of host states for each save, own and buddies', from now on.

        They get no room of their own: ``reserve`` and what makes a slot leave room for them.
        """
        with self._lock:
            self._document_bytes = nbytes

    def reserve(self, slot_bytes: int) -> None:
        """Reserve the slots at rest, of at least ``slot_bytes`` each. Idempotent.

        Published slots stay. Larger free slots of an earlier life are replaced, so that no RAM is
        wasted. RamdiskFull with both sizes before any change. Blocks for about a second per GiB,
        since the kernel clears each page.
        """
        self._check_open("reserve slots in")
        with self._saving:
            target, missing, kept, too_large = self._other_runs.with_room(
                lambda: self._check_reservable(slot_bytes)
            )
            for slot in too_large:
                self._discard(slot)
            for slot in kept:
                slot.grow(target)
            for _ in range(missing):
                self._add_slot(target)
            self._reserved_bytes = target

    def check_reservable(self, slot_bytes: int) -> None:
        """Raise RamdiskFull with both sizes when ``reserve`` would find no room. Makes no slot."""
        self._check_open("reserve slots in")
        with self._saving:
            self._other_runs.with_room(lambda: self._check_reservable(slot_bytes))

    def _check_reservable(self, slot_bytes: int) -> tuple[int, int, list[Slot], list[Slot]]:
        """Return (slot size, number to make, slots to keep, free slots that are too large)."""
        self._mend()
        target = max(whole_pages(slot_bytes), self._reserved_bytes)
        with self._lock:
            if target > self._reserved_bytes:
                self._spare_slots = 0  # the slots that saves need come first
            self._drop_surplus()
            slots = list(self._own.slots)
            too_large = [
                slot
                for slot in slots
                if self._reserved_bytes < target < slot.size_bytes
                and slot.published is None
                and not self._in_use(slot)
            ]
        kept = [slot for slot in slots if slot not in too_large]
        missing = max(self._slots_at_rest - len(kept), 0)
        needed = missing * target + sum(max(target - slot.size_bytes, 0) for slot in kept)
        needed += self._missing_document_bytes()
        if needed > 0:
            # A slot beyond those at rest makes way for host states.
            freed = sum(slot.size_bytes for slot in [*too_large, *kept[self._slots_at_rest :]])
            places = claims.process_directories(self._run_dir)
            waiting = sum(not any(place.glob("slot_*.bin")) for place in places)
            needed += SMALL_FILES_BYTES - freed
            check_room(self._own.claim, needed, processes=max(waiting, 1))
        return target, missing, kept, too_large

    def prefault_in_background(self, reserve_bytes: int | None = None) -> None:
        """Touch the pages of all slots in a background thread, so that saves find them mapped.

        With ``reserve_bytes``, ``reserve`` runs first, after a successful ``check_reservable``;
        saves wait for it. A request during another one is done next. Changes no byte. A failure is
        logged, and the next save reports it.
        """
        self._prefaulter.ask(reserve_bytes)

    def map_newest_in_background(self) -> None:
        """Map the newest step, or without one the free slot, in a background thread.

        For a restore, which reads the one or receives into the other. Else as
        ``prefault_in_background``.
        """
        self._prefaulter.ask(None, newest_only=True)

    def begin_write_in_memory(self, save: SaveId, nbytes: int) -> SlotWriter:
        """Return the writer of a slot in memory of this process, for a restore without room.

        What it publishes is held as if it were in the ramdisk, until the next save begins. What
        memory holds of other saves goes now. LocalTierError when there is none.
        """
        self._check_open("write to")
        with self._saving, self._lock:
            slot = self._own.make_memory_slot(save, nbytes)
            slot.writing = True
            return SlotWriter(slot, save, self._writer, self._threads, self._lock, self._own)

    def begin_write(
        self, save: SaveId, nbytes: int, *, allow_extra: bool = False, sparse: bool = False
    ) -> SlotWriter:
        """Return the writer of a slot of at least ``nbytes`` for ``save``; see ``choose_slot``.

        Removes the slot's old manifest, so the old save no longer counts. With ``allow_extra`` a
        slot is made when all hold protected saves, and for its room slots go that hold no protected
        save (for a restore). With ``sparse`` what is new of
        it has holes, for bytes that are written to its file (``SlotWriter.sparse_file``). SlotBusy
        when no slot is available; RamdiskFull when one must be made or grown without room (then
        protected saves stay).
        """
        self._check_open("write to")
        if save.run_id != self._run_dir.name:
            raise LocalTierError("begin write of", str(save), "it is of another run")
        with self._saving:
            self._mend()
            with self._lock:
                if not allow_extra:
                    self._own.drop_memory()
                self._drop_surplus()
                choice = choose_slot(
                    self._slot_states(),
                    self._kept(),
                    allow_extra=allow_extra,
                    at_rest=self._slots_at_rest,
                )
            if choice.number is None and not choice.make_one:
                raise SlotBusy(
                    "begin write of",
                    f"step {save.step}",
                    choice.reason,
                    hint="the next save tries again; drop restored arrays that are not in use",
                )
            slot = self._slot_of(choice, save, nbytes, sparse=sparse, restores=allow_extra)
            with self._lock:
                # The tables may have changed while the slot was growing.
                held = slot.published.save if slot.published else None
                if self._in_use(slot) or held in self._kept():
                    raise SlotBusy("begin write of", f"step {save.step}", "the slot was just taken")
                try:
                    slot.unpublish()
                except OSError as error:
                    raise files.local_error("invalidate", str(self.path), error) from error
                slot.writing = True
            return SlotWriter(slot, save, self._writer, self._threads, self._lock, self._own)

    def keeps_lent_for_storage(self) -> StorageSource:
        """Return whether a slot on loan to storage may stay so however long storage takes.

        Makes the spare slot that this needs, and keeps it from then on: storage comes back with
        each of its saves. May block for about a second per GiB.
        """
        with self._saving:
            with self._lock:
                states = self._slot_states()
            has_room = self._has_room(self._slots_at_rest)
            choice = choose_storage_source(states, has_room, self._slots_at_rest)
            if choice.make_one:
                try:
                    self._add_slot(self._reserved_bytes)
                except RamdiskFull as error:
                    return StorageSource(False, False, str(error))
                self._spare_slots = 1
            return choice

    def protect(self, saves: Iterable[SaveId]) -> None:
        """Protect these saves, and no others, from being overwritten."""
        with self._lock:
            self._protected = frozenset(saves)

    @property
    def finite(self) -> SaveId | None:
        """Return the newest save held here that is known to be finite on all processes."""
        with self._lock:
            return self._own.finite

    @property
    def pinned(self) -> SaveId | None:
        """Return the save that stays because it is ``finite``; None where saves need its slot.

        They need one for the newest complete save, one for each in doubt, and one to write to. A
        restore that finds no room may still take it.
        """
        with self._lock:
            finite = self._own.finite if self._keeps_finite else None
            is_room = finite in self._protected or len(self._protected) + 2 <= self._slots_at_rest
            return finite if is_room else None

    def _kept(self) -> frozenset[SaveId]:
        pinned = self.pinned
        return self._protected if pinned is None else self._protected | {pinned}

    def note_complete(
        self, save: SaveId, *, is_finite: bool = False, lives: int | None = None
    ) -> None:
        """Record ``save`` as complete on all processes; slots of older saves may then be reused.

        Host states of older saves are removed once the slot of their tensors is overwritten.
        ``is_finite``: no value of it is NaN or infinite, on any process. ``lives``: it was
        restored, and so many in a row began from it.
        RamdiskFull, LocalTierError when the record cannot be written; then nothing is released.
        """
        self._check_open("note a complete save in")
        with self._saving, self._lock:
            self._own.note_complete(save, is_finite=is_finite, lives=lives)
            for slot in self._own.slots:
                held = slot.published.save if slot.published else None
                if held == save:
                    slot.whole = True
                elif held is not None and slot.whole is False and held < save:
                    slot.unpublish()  # the next life could not tell it from a whole one
            newer = {held for held in self._protected if held.step > save.step}
            self._protected = frozenset({h for h in newer if not self._own.excludes(h)} | {save})
            self._drop_surplus()

    def restored(self) -> tuple[RestoredSave, ...]:
        """Return the saves that the newest lives began from, by the records here."""
        with self._lock:
            found = [place.ledger.restored for place in self._directories()]
        return tuple(each for each in found if isinstance(each, RestoredSave))

    def note_orderly_end(self) -> None:
        """Record that this life does not end because of the save that it began from.

        A failure is logged: the life counts as ended by it.
        """
        with self._lock:
            try:
                self._own.note_orderly_end()
            except (CheckpointError, OSError) as error:
                logging.warning("the orderly end of this life is not on record: %s", error)

    def drop(self, save: SaveId) -> None:
        """Unpublish ``save`` and free its slot, unless it is protected or being read."""
        with self._lock:
            for slot in self._own.slots:
                held = slot.published.save if slot.published else None
                if held == save and held not in self._kept() and not self._in_use(slot):
                    slot.unpublish()

    def publish_host_state(
        self,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        restores: bool = False,
        in_memory: bool = False,
    ) -> None:
        """Publish an encoded host state, own or a buddy's; see ``HostStateStore.publish``.

        Where there is no room, host states make way that no step here needs any more, and slots
        that saves do not need; with ``restores`` all that is not of a protected save.
        """
        self._mend()

        def publish() -> None:
            self._own.host_states.publish(save, owner, count, data, in_memory=in_memory)

        try:
            publish()
        except RamdiskFull:
            with self._saving:
                self._with_room(publish, save, restores=restores)

    def close(self) -> None:
        """Release the directory; published saves stay for the next life. Idempotent.

        While lent memory is alive, only this process can claim the directory again, and it does not
        write to the lent slots.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._prefaulter.close(_CLOSE_TIMEOUT_S)
        with self._lock:
            lent = any(slot.lent for place in self._directories() for slot in place.slots)
        if lent:
            # JAX keeps the host memory of deleted arrays until the next garbage collection.
            gc.collect()
        with self._lock:
            for place in self._directories():
                place.close()
            self._orphans.clear()

    def _check_open(self, operation: str) -> None:
        if self._closing.is_set():
            raise LocalTierError(operation, str(self.path), "the tier was closed")

    def _mend(self) -> None:
        """Make the directory or slots again that another program removed; their saves are lost.

        LocalTierError when that fails, or another process has claimed the directory.
        """
        with self._lock:
            if self._closing.is_set():
                return
            if not self._own.claim.is_in_place():
                self._own = self._own.made_again(self._run_dir, self._writer, self._start)
            self._own.drop_lost_slots()

    def _drop_surplus(self) -> None:
        complete = self._own.ledger.complete
        states = self._slot_states()
        dropped = surplus_slots(states, self._kept(), complete, self._slots_at_rest)
        for slot in [slot for slot in self._own.slots if slot.number in dropped]:
            if slot.number in dropped[: self._spare_slots]:
                slot.unpublish()
            else:
                self._own.discard(slot)

    def _discard(self, slot: Slot) -> None:
        with self._lock:
            self._own.discard(slot)

    def _slot_of(
        self, choice: SlotChoice, save: SaveId, nbytes: int, *, sparse: bool, restores: bool
    ) -> Slot:
        size_bytes = max(nbytes, self._reserved_bytes)
        if choice.number is None:
            return self._with_room(
                lambda: self._add_slot(size_bytes, sparse=sparse), save, restores=restores
            )
        if choice.make_one:
            with contextlib.suppress(RamdiskFull):
                return self._add_slot(size_bytes, sparse=sparse)
        slot = next(slot for slot in self._own.slots if slot.number == choice.number)
        self._with_room(
            lambda: slot.grow(nbytes, sparse=sparse), save, keep=slot, restores=restores
        )
        return slot

    def _with_room(
        self,
        work: Callable[[], _T],
        save: SaveId,
        *,
        keep: Slot | None = None,
        restores: bool,
    ) -> _T:
        """Call ``work`` until it finds room: what is needed least here makes way, then other runs.

        RamdiskFull when nothing is left that may go. The caller holds ``_saving``.
        """

        def after_making_way() -> _T:
            while True:
                try:
                    return work()
                except RamdiskFull:
                    if not self._make_way(save, keep, restores=restores):
                        raise

        return self._other_runs.with_room(after_making_way)

    def _make_way(self, save: SaveId, keep: Slot | None, *, restores: bool) -> bool:
        """Remove what is needed least, but ``keep`` and what is of ``save``; False for nothing.

        First host states of which no step here has need, then a slot: for a save, of those that
        saves have beyond what they need.
        """
        with self._lock:
            own, complete = self._own, self._own.ledger.complete
            kept = {save, *self._protected} | ({complete} if complete else set())

            def may_go(held: SaveId) -> bool:
                return restores or (complete is not None and held < complete)

            published = {slot.published.save for slot in own.published() if slot.published}
            documents = {held.save for held in own.host_states.held()} - kept - published
            gone = min(filter(may_go, documents), default=None)
            if gone is None and (restores or len(own.slots) > self._slots_at_rest):
                states = [
                    state
                    for state in self._slot_states()
                    if (keep is None or state.number != keep.number)
                    and (state.save is None or may_go(state.save))
                ]
                number = least_needed(states, {save, *self._protected})
                slot = next((slot for slot in own.slots if slot.number == number), None)
                if slot is None:
                    return False
                gone = slot.published.save if slot.published else None
                own.discard(slot)
            elif gone is None:
                return False
            own.host_states.remove_if(lambda held: held.save == gone and gone not in kept)
            return True

    def _add_slot(self, size_bytes: int, *, sparse: bool = False) -> Slot:
        slot = self._own.make_slot(size_bytes, sparse=sparse)
        with self._lock:
            self._own.slots.append(slot)
        return slot
