"""The local tier: the slots and host states of one process on its host's ramdisk.

See FORMAT.md for the files. One thread at a time saves (``reserve``, ``begin_write``); everything
else may be called from any thread meanwhile. Nothing here is collective.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from absl import logging

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError, SlotBusy
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.old_lives import claim_or_wait
from emergency_ckpt.tiers.local.prefault import Prefaulter
from emergency_ckpt.tiers.local.process_directory import ProcessDirectory
from emergency_ckpt.tiers.local.published import SMALL_FILES_BYTES, HeldCopies
from emergency_ckpt.tiers.local.signatures import Signer
from emergency_ckpt.tiers.local.slot_choice import (
    SLOTS_AT_REST,
    SlotState,
    choose_slot,
    surplus_slots,
)
from emergency_ckpt.tiers.local.slot_writer import SlotWriter
from emergency_ckpt.tiers.local.slots import Slot, check_room, whole_pages
from emergency_ckpt.tiers.ramdisk import locks as claims
from emergency_ckpt.tiers.ramdisk.other_runs import OtherRuns
from emergency_ckpt.types import SaveId, Writer

__all__ = ["LocalTier", "SlotWriter"]

_CLOSE_TIMEOUT_S = 30.0


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
    ) -> None:
        super().__init__(own, copy_threads, slots)
        self._other_runs = other_runs or OtherRuns(run_dir.parent, run_dir.name)
        self._start = start
        self._run_dir = run_dir
        self._writer = writer
        self._protected: frozenset[SaveId] = frozenset(
            slot.published.save for slot in own.published() if slot.published is not None
        )
        self._reserved_bytes = 0
        # Serialises what may take long, so that _lock is held for moments only.
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
        host_state_limit_bytes: int,
        copy_threads: int,
        slots: int = SLOTS_AT_REST,
        start: str = "",
        wait_s: float = 0.0,
        other_runs: OtherRuns | None = None,
        signer: Signer | None = None,
    ) -> LocalTier:
        """Claim ``<local_dir>/<run_id>/<process directory>/`` and scan what it holds.

        Takes the directory named for ``writer.process_index``, else any of this run that no live
        process owns, else makes its own. One that a process of another ``start`` holds is waited
        for, ``wait_s`` seconds. What is wrong with what it finds is quarantined, never raised.
        Until the first ``protect`` or ``note_complete`` every save found is protected. ``slots``:
        how many there are at rest, one more than the whole steps to keep. ``signer``: signs what is
        published; nothing is believed then that is not signed.

        ``ConfigError`` for a bad run id, ``LocalTierError`` when the ramdisk cannot be used, or an
        earlier life of the run does not let go of it. The claim ends with ``close`` or with the
        process.
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
        )

    @property
    def path(self) -> Path:
        """This process's directory."""
        return self._own.claim.path

    def is_intact(self) -> bool:
        """Whether the directory and the slots are still there: nobody has deleted them."""
        with self._lock:
            own = self._own
            return own.claim.is_in_place() and all(slot.is_in_place() for slot in own.slots)

    def adopt_orphans(self, wait_s: float = 0.0) -> None:
        """Lock what is left unowned of this run, and offer it too; it is never written.

        To be called when all processes of the job have claimed their directories. Waits, so many
        seconds, for processes of another start; ``LocalTierError`` when one holds on.
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

    def release_orphans(self) -> None:
        """Delete the adopted directories; those that a reader serves stay, and are let go.

        Memory that views and readers still use goes when they do.
        """
        with self._lock:
            while self._orphans:
                orphan = self._orphans.pop()
                if not orphan.delete():
                    logging.info("%s is still being served; it stays", orphan.claim.path)

    def reserve(self, slot_bytes: int) -> None:
        """Make sure of the slots at rest, of at least so many bytes. Idempotent; what is
        published stays.

        Free slots of an earlier life that are larger are made anew, so that no RAM is wasted.
        ``RamdiskFull`` with both sizes before anything is changed. Blocks for about a second
        per GiB: the kernel clears each page.
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
        """``RamdiskFull`` with both sizes when ``reserve`` would find no room. Makes no slot."""
        self._check_open("reserve slots in")
        with self._saving:
            self._other_runs.with_room(lambda: self._check_reservable(slot_bytes))

    def _check_reservable(self, slot_bytes: int) -> tuple[int, int, list[Slot], list[Slot]]:
        """(slot size, slots to make, slots to keep, free slots that are too large)."""
        self._mend()
        target = max(whole_pages(slot_bytes), self._reserved_bytes)
        with self._lock:
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
        if needed > 0:
            freed = sum(slot.size_bytes for slot in too_large)
            check_room(self._own.claim, needed + SMALL_FILES_BYTES - freed)
        return target, missing, kept, too_large

    def prefault_in_background(self, reserve_bytes: int | None = None) -> None:
        """Touch the pages of all slots in a thread of its own, so that saves find them mapped.

        With ``reserve_bytes`` it does ``reserve`` first, for which ``check_reservable`` has found
        room: saves wait for it. What is asked for while that thread is at work, it does next.
        Changes no byte. A failure is logged; the next save meets it.
        """
        self._prefaulter.ask(reserve_bytes)

    def begin_write(
        self, save: SaveId, nbytes: int, *, allow_extra: bool = False, sparse: bool = False
    ) -> SlotWriter:
        """The writer of a slot of at least ``nbytes`` for ``save``; see ``choose_slot``.

        The slot's old manifest is removed before this returns: nothing of the old save counts from
        then on. With ``allow_extra`` a slot is made when all hold protected saves (for a restore).
        With ``sparse`` a slot that must be made has holes, for bytes that are written to its file
        (``SlotWriter.sparse_file``). ``SlotBusy`` when no slot may be written now; ``RamdiskFull``
        when one must be made or grown and there is no room (what was published stays then).
        """
        self._check_open("write to")
        if save.run_id != self._run_dir.name:
            raise LocalTierError("begin write of", str(save), "it is of another run")
        with self._saving:
            self._mend()
            with self._lock:
                self._drop_surplus()
                choice = choose_slot(
                    self._slot_states(),
                    self._protected,
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
            if choice.number is None:
                size_bytes = max(nbytes, self._reserved_bytes)
                slot = self._other_runs.with_room(lambda: self._add_slot(size_bytes, sparse=sparse))
            else:
                slot = next(slot for slot in self._own.slots if slot.number == choice.number)
                self._other_runs.with_room(lambda: slot.grow(nbytes))
            with self._lock:
                # The tables may have changed while the slot was growing.
                held = slot.published.save if slot.published else None
                if self._in_use(slot) or held in self._protected:
                    raise SlotBusy("begin write of", f"step {save.step}", "the slot was just taken")
                try:
                    slot.unpublish()
                except OSError as error:
                    raise files.local_error("invalidate", str(self.path), error) from error
                slot.writing = True
            return SlotWriter(slot, save, self._writer, self._threads, self._lock, self._own)

    def protect(self, saves: Iterable[SaveId]) -> None:
        """From now on these saves, and no others, are never overwritten."""
        with self._lock:
            self._protected = frozenset(saves)

    def note_complete(self, save: SaveId) -> None:
        """``save`` is globally complete: kept on record; slots of older saves may be reused.

        Host states of older saves are removed, once the slot of their tensors was written again.
        ``RamdiskFull``, ``LocalTierError`` when the record cannot be written; then nothing is
        released.
        """
        self._check_open("note a complete save in")
        with self._saving, self._lock:
            self._own.note_complete(save)
            newer = {held for held in self._protected if held.step > save.step}
            self._protected = frozenset(newer | {save})
            self._drop_surplus()

    def drop(self, save: SaveId) -> None:
        """Unpublish ``save`` here, unless it is protected or being read: its slot is free then."""
        with self._lock:
            for slot in self._own.slots:
                held = slot.published.save if slot.published else None
                if held == save and held not in self._protected and not self._in_use(slot):
                    slot.unpublish()

    def remove(self, step: int) -> None:
        """Unpublish every save of ``step``, protected or not, with its host states.

        When nothing is published any more, nothing is on record as complete either.
        """
        with self._lock:
            for slot in self._own.slots:
                if slot.published is not None and slot.published.save.step == step:
                    slot.unpublish()
            self._own.host_states.remove_if(lambda held: held.save.step == step)
            is_empty = not any(self._own.published())
        if is_empty:
            self.invalidate_newer(SaveId(-1, "", self._run_dir.name))

    def invalidate_newer(self, than: SaveId) -> None:
        """After a restore of ``than``: nothing later counts any more, here and in orphans.

        Later: a greater step, or the same step of another incarnation. Nor is anything later on
        record as complete: ``than`` is instead, or nothing when it has no incarnation.
        """
        with self._lock:
            for place in self._directories():
                try:
                    place.invalidate_newer(than)
                except OSError as error:
                    target = str(place.claim.path)
                    raise files.local_error("invalidate in", target, error) from error

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Keep an encoded host state, own or a buddy's; see ``HostStateStore.publish``."""
        self._mend()
        self._own.host_states.publish(save, owner, count, data)

    def close(self) -> None:
        """Let go of the directory; what is published stays for the next life. Idempotent.

        While lent memory lives, only this process can claim the directory again, and it does not
        write to the lent slots.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._prefaulter.close(_CLOSE_TIMEOUT_S)
        with self._lock:
            lent = any(slot.lent for place in self._directories() for slot in place.slots)
        if lent:
            # JAX keeps the host memory of deleted arrays until the next collection.
            gc.collect()
        with self._lock:
            for place in self._directories():
                place.close()
            self._orphans.clear()

    def _check_open(self, operation: str) -> None:
        if self._closing.is_set():
            raise LocalTierError(operation, str(self.path), "the tier was closed")

    def _mend(self) -> None:
        """Make again what somebody removed under the live job; what it held is lost.

        LocalTierError when it cannot be made, or somebody else has taken the directory.
        """
        with self._lock:
            if self._closing.is_set():
                return
            if not self._own.claim.is_in_place():
                self._own = self._own.made_again(self._run_dir, self._writer, self._start)
            self._own.drop_lost_slots()

    def _slot_states(self) -> list[SlotState]:
        return [
            SlotState(
                number=slot.number,
                save=slot.published.save if slot.published else None,
                lent=slot.lent,
                in_use=slot.writing or slot.readers > 0,
            )
            for slot in self._own.slots
        ]

    def _in_use(self, slot: Slot) -> bool:
        return slot.lent or slot.writing or slot.readers > 0

    def _drop_surplus(self) -> None:
        complete = self._own.known_complete
        states = self._slot_states()
        dropped = surplus_slots(states, self._protected, complete, self._slots_at_rest)
        for slot in [slot for slot in self._own.slots if slot.number in dropped]:
            self._own.discard(slot)

    def _discard(self, slot: Slot) -> None:
        with self._lock:
            self._own.discard(slot)

    def _add_slot(self, size_bytes: int, *, sparse: bool = False) -> Slot:
        slot = self._own.make_slot(size_bytes, sparse=sparse)
        with self._lock:
            self._own.slots.append(slot)
        return slot

    def _mappings(self) -> list[Mapping]:
        with self._lock:
            return [slot.mapping for slot in self._own.slots]
