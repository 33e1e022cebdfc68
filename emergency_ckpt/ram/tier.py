"""The local tier: the slots and host states of one process on its host's ramdisk.

FORMAT.md beside this file specifies the files. ``held_saves`` has what readers need; here slots are
reserved, written, published and given up. One thread at a time may save (``reserve``,
``begin_write``); all other methods are thread-safe. Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from absl import logging

from emergency_ckpt import files
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import SMALL_FILES_BYTES
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CheckpointError, LocalTierError, NotHeld, RamdiskFull, SlotBusy
from emergency_ckpt.ram import locks as claims
from emergency_ckpt.ram.held_saves import HeldSaves
from emergency_ckpt.ram.leftovers import OtherRuns, claim_or_wait
from emergency_ckpt.ram.process_directory import ProcessDirectory
from emergency_ckpt.ram.process_files import slot_number
from emergency_ckpt.ram.slot_choice import (
    SLOTS_AT_REST,
    SlotState,
    choose_slot,
    least_needed,
    slots_for,
    surplus_slots,
)
from emergency_ckpt.ram.slot_writer import SlotWriter
from emergency_ckpt.ram.slots import Prefaulter, Slot, SlotMemory, check_room, whole_pages
from emergency_ckpt.state.mapped import Mapper, Pin
from emergency_ckpt.types import LOCAL, Contents, SaveId, TierName, Writer

__all__ = ["LocalTier", "SlotWriter"]

_CLOSE_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class LocalTier(HeldSaves):
    """Slots and host states of one process; see the module.

    ``_lock`` guards the tables. ``_saving`` is held while slots are made, grown or deleted, which
    takes long. A thread that needs both locks takes ``_saving`` first.
    """

    name: TierName = LOCAL

    def __init__(
        self,
        local_dir: Path,
        run_id: str,
        writer: Writer,
        *,
        copy_threads: int,
        slots: int = SLOTS_AT_REST,
        start: str = "",
        wait_s: float = 0.0,
        other_runs: OtherRuns | None = None,
        mapper: Mapper | None = None,
        on_refused: Callable[[str], None] = logging.warning,
    ) -> None:
        """Claim ``<local_dir>/<run_id>/<process directory>/`` and scan what it holds.

        Takes the directory named for ``writer.process_index``, else any of this run that no live
        process owns, else makes one. Waits up to ``wait_s`` seconds for a directory that a process
        of another ``start`` holds. Damaged files are quarantined, never raised. Until the first
        ``protect`` or ``note_complete`` every save found is protected. ``slots``: number of slots
        that saves need, one more than the complete steps to keep.
        ``mapper``: maps slots for the devices' DMA, in the background. ``on_refused``: told once
        why that was refused, and what to raise; all goes on without it.

        ConfigError for an invalid run id; LocalTierError when the ramdisk cannot be used, or an
        earlier life of the run still holds it. The claim ends with ``close`` or with the process.
        """
        claims.check_run_id(run_id)
        claim = claim_or_wait(
            lambda is_settled: claims.claim_directory(
                local_dir, run_id, writer.process_index, start, is_settled=is_settled
            ),
            run_id,
            wait_s,
        )
        try:
            own = ProcessDirectory(claim, run_id, mapper)
        except OSError as error:
            raise files.local_error("open", str(claim.path), error) from error
        self._prefaulter = Prefaulter(
            str(claim.path), self.reserve, self._memories, on_refused, copy_threads
        )
        super().__init__(own, copy_threads, self._prefaulter.ask_first)
        self._run_dir = local_dir / run_id
        self._writer = writer
        self._start = start
        self._other_runs = other_runs or OtherRuns(local_dir, run_id)
        self._places: tuple[tuple[int, int], ...] = ()
        self._document_bytes = 0
        self._slots_needed = self._slots_at_rest = slots
        self._slots_to_come = 0  # after the reservation that was checked and has not run yet
        self._reserved_bytes = 0
        self._protected = frozenset(own.saves())
        self._lost: list[ProcessDirectory] = []  # removed by others, and some slot is in use
        self._saving = threading.Lock()
        self._closing = threading.Event()

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
            if path == self.path:
                continue
            try:
                claim = claim_or_wait(
                    partial(self._claim_existing, path), self._run_dir.name, wait_s
                )
                if claim is None:
                    continue
                orphan = ProcessDirectory(claim, self._run_dir.name)
            except OSError as error:
                raise files.local_error("adopt", str(path), error) from error
            with self._lock:
                self._orphans.append(orphan)

    def _claim_existing(self, path: Path, is_settled: bool) -> claims.Claim | claims.Holder | None:
        return claims.claim_existing(path, self._start, is_settled=is_settled)

    def release_orphans(self) -> None:
        """Delete the adopted directories; release those that stay: see ``Claim.delete``.

        Readers keep their memory alive.
        """
        while True:
            with self._lock:
                if not self._orphans:
                    return
                orphan = self._orphans.pop()
            # Without the lock: the kernel needs tenths of a second for each GiB.
            if not orphan.delete():
                logging.info("%s stays: it is served, or has other files", orphan.claim.path)

    # The reservation of slots.

    def plan_saves(
        self,
        document_bytes: int,
        *,
        writes_storage: bool,
        places: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Note what the saves to come need, before their slots are reserved.

        Args:
          document_bytes: of the host states of one save, own and buddies'. They get no room of
            their own: ``reserve`` and what makes a slot leave room for them.
          writes_storage: this process writes to storage; see ``slot_choice.slots_for``.
          places: (offset, nbytes) of the shards in a slot, which is mapped for DMA in pieces that
            cut none of them where possible.
        """
        with self._lock:
            self._places = tuple(places)
            self._document_bytes = document_bytes
            kept_steps = self._slots_needed - 1
            self._slots_at_rest = slots_for(kept_steps, writes_storage=writes_storage)

    def reserve(self, slot_bytes: int) -> None:
        """Reserve the slots at rest, of at least ``slot_bytes`` each. Idempotent.

        The extra slot of a process that writes to storage is left out where there is no room.
        Published slots stay. Larger free slots of an earlier life are replaced, so that no RAM is
        wasted. RamdiskFull with both sizes before any change. Blocks for about a second per GiB,
        since the kernel clears each page.
        """
        self._check_open("reserve slots in")
        with self._saving:
            try:
                size_bytes, slots, missing = self._other_runs.with_room(
                    lambda: self._check_reservable(slot_bytes)
                )
                with self._lock:
                    too_large = [slot for slot in self._own.slots if slot not in slots]
                    taken = self._own.take_out(too_large)
                _delete(taken)
                for slot in slots:
                    slot.grow(size_bytes)
                for _ in range(missing):
                    try:
                        self._add_slot(size_bytes)
                    except RamdiskFull:
                        if len(self._own.slots) < self._slots_needed:
                            raise
                        break  # others took the room; the slots that saves need are there
                self._reserved_bytes = size_bytes
            finally:
                self._slots_to_come = 0

    def check_reservable(self, slot_bytes: int) -> None:
        """Raise RamdiskFull with both sizes when ``reserve`` would find no room. Makes no slot."""
        self._check_open("reserve slots in")
        with self._saving:
            _, slots, missing = self._other_runs.with_room(
                lambda: self._check_reservable(slot_bytes)
            )
            self._slots_to_come = len(slots) + missing

    def _check_reservable(self, slot_bytes: int) -> tuple[int, list[Slot], int]:
        """Return (slot size, slots to keep, number to make): free slots that are too large go."""
        self._mend()
        size_bytes = max(whole_pages(slot_bytes), self._reserved_bytes)
        with self._lock:
            surplus = self._take_surplus()
            slots = list(self._own.slots)
            too_large = [
                slot
                for slot in slots
                if self._reserved_bytes < size_bytes < slot.size_bytes
                and slot.published is None
                and not slot.in_use
            ]
        _delete(surplus)
        reusable = [slot for slot in slots if slot not in too_large]
        places = claims.process_directories(self._run_dir)
        waiting = sum(
            not any(slot_number(path.name) is not None for path in place.glob("slot_*.bin"))
            for place in places
        )

        def missing_of(count: int, others_bytes: int) -> int:
            """Return the number to make for ``count`` slots. RamdiskFull.

            ``others_bytes``: to leave for other processes of this host.
            """
            missing = max(count - len(reusable), 0)
            needed = missing * size_bytes
            needed += sum(max(size_bytes - slot.size_bytes, 0) for slot in reusable)
            needed += self._missing_document_bytes()
            if needed > 0:
                # A slot beyond those at rest makes way for host states.
                freed = sum(slot.size_bytes for slot in [*too_large, *reusable[count:]])
                needed += SMALL_FILES_BYTES - freed + others_bytes
                check_room(self._own.claim, needed, processes=max(waiting, 1))
            return missing

        if self._slots_at_rest > self._slots_needed:
            at_rest = self._slots_at_rest
            others = max(waiting - (not slots), 0)
            with contextlib.suppress(RamdiskFull):  # only what saves need must have room
                return size_bytes, reusable, missing_of(at_rest, others * at_rest * size_bytes)
        return size_bytes, reusable, missing_of(self._slots_needed, 0)

    def _missing_document_bytes(self) -> int:
        """Return the room that host states of saves to come take beside those that are here."""
        with self._lock:
            by_save: Counter[SaveId] = Counter()
            for host_state in self._own.host_states.held():
                by_save[host_state.save] += host_state.size_bytes
            largest_bytes = max([self._document_bytes, *by_save.values()])
            return max(self._slots_needed * largest_bytes - by_save.total(), 0)

    def prefault_in_background(self, reserve_bytes: int | None = None) -> None:
        """Touch the pages of all slots in a background thread, and map the slots for DMA.

        With ``reserve_bytes``, ``reserve`` runs first, after a successful ``check_reservable``, and
        saves wait for the reservation. A failure is logged, and the next save reports it.
        """
        self._prefaulter.ask(reserve_bytes)

    def map_newest_in_background(self) -> None:
        """Map the slot that a restore will read or receive into, as ``prefault_in_background``.

        This is the slot of the newest step, and without a step the largest free slot.
        """
        self._prefaulter.ask(None, newest_only=True)

    def _memories(self, newest_only: bool) -> list[SlotMemory]:
        """Return the memory of own slots, the newest step's first: a restore reads that."""
        with self._lock:
            slots = sorted(
                self._own.slots, key=lambda slot: slot.save.step if slot.save else -1, reverse=True
            )
            if newest_only and slots:
                saves = {
                    slot.save: slot
                    for slot in slots
                    if slot.save is not None and not self._own.excludes(slot.save)
                }
                slots = [saves[max(saves)] if saves else max(slots, key=lambda s: s.size_bytes)]
            return [slot.wanted(self._places) for slot in slots]

    # The write of a save.

    def begin_write(
        self,
        save: SaveId,
        nbytes: int,
        *,
        places: Iterable[tuple[int, int]] | None = None,
        restores: bool = False,
    ) -> SlotWriter:
        """Return the writer of a slot of at least ``nbytes`` for ``save``; see ``choose_slot``.

        Removes the slot's old manifest, so the old save no longer counts. A slot that must be made
        or grown is reserved first, which takes a third of a second per GiB or more. A slot that is
        not mapped for DMA is mapped from now on, in the background. With ``restores`` a slot beyond
        those of saves may be made when all hold protected saves, and slots without a protected save
        are removed if the new slot needs their room. SlotBusy when no slot is available;
        RamdiskFull when one must be made or grown without room (then protected saves stay).

        Args:
          places: (offset, nbytes) of what is written; None: as given to ``plan_saves``.
        """
        self._check_open("write to")
        if save.run_id != self._run_dir.name:
            raise LocalTierError("begin write of", str(save), "it is of another run")
        with self._saving:
            self._mend()
            with self._lock:
                # A restore may still have to go back to an older step.
                surplus = [] if restores else self._take_surplus()
                choice = choose_slot(
                    self._slot_states(),
                    self._protected,
                    needed=self._slots_needed,
                    at_rest=self._slots_at_rest,
                    allow_extra=restores,
                )
            _delete(surplus)
            if choice.number is not None:
                slot = next(slot for slot in self._own.slots if slot.number == choice.number)
                self._with_room(lambda: slot.grow(nbytes), save, keep=slot, restores=restores)
            elif choice.make_one:
                size_bytes = max(nbytes, self._reserved_bytes)
                slot = self._with_room(lambda: self._add_slot(size_bytes), save, restores=restores)
            else:
                raise SlotBusy(
                    "begin write of",
                    f"step {save.step}",
                    choice.reason,
                    hint="the next save tries again",
                )
            with self._lock:
                # The tables may have changed while the slot was growing.
                if slot.in_use or slot.save in self._protected:
                    raise SlotBusy("begin write of", f"step {save.step}", "the slot was just taken")
                try:
                    slot.unpublish()
                except OSError as error:
                    raise files.local_error("invalidate", str(self.path), error) from error
                slot.writing = True
                memory = slot.wanted(self._places if places is None else places)
            self._prefaulter.ask_first([memory])
            return SlotWriter(slot, save, self._writer, self._threads, self._lock, self._own)

    def _add_slot(self, size_bytes: int) -> Slot:
        slot = self._own.make_slot(size_bytes)
        with self._lock:
            if not self._closing.is_set():
                self._own.slots.append(slot)
                return slot
        slot.close()  # ``close`` did not wait any longer; a later life may have the directory
        raise LocalTierError("make a slot in", str(self.path), "the tier was closed")

    def publish_host_state(
        self,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        restores: bool = False,
    ) -> None:
        """Publish an encoded host state, own or a buddy's; see ``HostStateStore.publish``.

        Where there is no room, the host states that no step here needs any more make way, and the
        slots that saves do not need. With ``restores`` all but protected saves make way.
        """
        # A write under way has looked at its beginning, and has a slot that is not in use yet.
        if self._saving.acquire(blocking=False):
            try:
                self._mend()
            finally:
                self._saving.release()

        def publish() -> None:
            self._own.host_states.publish(save, owner, count, data)

        try:
            publish()
        except RamdiskFull:
            with self._saving:
                self._with_room(publish, save, restores=restores)

    def _with_room(
        self,
        work: Callable[[], _T],
        save: SaveId,
        *,
        keep: Slot | None = None,
        restores: bool,
    ) -> _T:
        """Call ``work`` until there is room. After a failure the least needed data make way.

        These are first data of this run, then of other runs. RamdiskFull when no data are left
        that may go. The caller holds ``_saving``.
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
        """Remove what is needed least, but not ``keep`` nor parts of ``save``; False for nothing.

        Host states that no step here needs go first, then a slot: for a save, only a slot beyond
        those that saves need.
        """
        with self._lock:
            own, complete = self._own, self._own.ledger.complete
            saves_to_keep = {save, *self._protected} | ({complete} if complete else set())

            def may_go(old_save: SaveId) -> bool:
                return restores or (complete is not None and old_save < complete)

            documents = {host_state.save for host_state in own.host_states.held()}
            gone = min(filter(may_go, documents - saves_to_keep - own.saves()), default=None)
            taken: list[Slot] = []
            if gone is None:
                if not restores and len(own.slots) <= self._slots_needed:
                    return False
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
                gone = slot.save
                taken = own.take_out([slot])
            own.host_states.remove_if(
                lambda host_state: host_state.save == gone and gone not in saves_to_keep
            )
        _delete(taken)
        return True

    def _slot_states(self) -> list[SlotState]:
        return [
            SlotState(
                number=slot.number,
                save=slot.save,
                in_use=slot.in_use,
                incomplete=slot.whole is False,
                excluded=slot.save is not None and self._own.excludes(slot.save),
            )
            for slot in self._own.slots
        ]

    def _take_surplus(self) -> list[Slot]:
        dropped = surplus_slots(
            self._slot_states(), self._protected, self._own.ledger.complete, self._slots_at_rest
        )
        return self._own.take_out(slot for slot in self._own.slots if slot.number in dropped)

    # Pins of saves to storage.

    def may_stay_pinned(self) -> bool:
        """Return whether local saves have slots enough beside those that are pinned now.

        Storage may then write from a pinned slot for hours. The slots that a checked reservation
        will make count too.
        """
        with self._lock:
            to_come = max(self._slots_to_come - len(self._own.slots), 0)
            free = sum(slot.pins.count() == 0 for slot in self._own.slots)
            return free + to_come >= self._slots_needed

    def pin(self, save: SaveId) -> tuple[Mapping, Pin, Contents]:
        """Pin the slot in which this process has ``save``. NotHeld where it has none.

        The slot is not written before the end of the pin; see ``SlotWriter.pin``. Whoever reads
        the memory compares the CRC32Cs of the contents.
        """
        with self._lock:
            for slot, published in self._own.published():
                if published.save == save:
                    if slot.is_cut():
                        raise NotHeld("pin", f"slot {slot.number}", "somebody cut its file short")
                    return slot.mapping, slot.pins.pin(slot.mapping), published.contents
        raise NotHeld("pin", f"step {save.step}", f"no slot in {self.path} has it")

    # Which saves count.

    def protect(self, saves: Iterable[SaveId]) -> None:
        """Protect these saves, and no others, from being overwritten."""
        with self._lock:
            self._protected = frozenset(saves)

    @property
    def finite(self) -> SaveId | None:
        """Return the newest save held here that is known to be finite on all processes."""
        with self._lock:
            return self._own.finite

    def note_complete(
        self, save: SaveId, *, is_finite: bool = False, lives: int | None = None
    ) -> None:
        """Record ``save`` as complete on all processes; slots of older saves may then be reused.

        Host states of older saves are removed once the slot of their tensors is overwritten.
        ``is_finite``: no value of ``save`` is NaN or infinite, on any process. ``lives``: ``save``
        was restored, and so many lives in a row began from it. RamdiskFull, LocalTierError when the
        record cannot be written; then nothing is released.
        """
        self._check_open("note a complete save in")
        with self._saving:
            with self._lock:
                own = self._own
                own.note_complete(save, is_finite=is_finite, lives=lives)
                for slot, published in own.published():
                    if published.save == save:
                        slot.whole = True
                    elif slot.whole is False and published.save < save:
                        slot.unpublish()  # the next life could not tell this save from a whole one
                newer = {protected for protected in self._protected if protected.step > save.step}
                self._protected = frozenset({h for h in newer if not own.excludes(h)} | {save})
                surplus = self._take_surplus()
            _delete(surplus)

    def note_stored(self, save: SaveId) -> None:
        """Record ``save`` as complete in storage: see ``Ledger.stored``. A failure is logged."""
        try:
            with self._lock:
                self._own.note_stored(save)
        except (CheckpointError, OSError) as error:
            logging.warning("step %d is not on record as stored: %s", save.step, error)

    def note_incomplete(self, save: SaveId) -> None:
        """Note that not all processes have ``save``: the next save takes its slot."""
        with self._lock:
            for slot in self._own.slots:
                if slot.save == save:
                    slot.whole = False

    def incomplete(self) -> set[SaveId]:
        """Return the saves held here of which ``note_incomplete`` was told."""
        with self._lock:
            return {
                published.save for slot, published in self._own.published() if slot.whole is False
            }

    def drop(self, save: SaveId) -> None:
        """Unpublish ``save`` and free its slot, unless it is protected or being read."""
        with self._lock:
            for slot in self._own.slots:
                if slot.save == save and save not in self._protected and not slot.in_use:
                    slot.unpublish()

    def keep_only(self, save: SaveId, digest: str) -> None:
        """Unpublish the slots of ``save`` except ``digest``, which has all shards needed here.

        Does nothing when ``digest`` is not published. Memory being read stays valid.
        """
        with self._lock:
            slots = [slot for slot in self._own.slots if slot.save == save]
            if any(slot.digest == digest for slot in slots):
                for slot in slots:
                    if slot.digest != digest:
                        slot.unpublish()

    def note_incarnation(self, incarnation: str) -> None:
        """Record that the job has begun a life. A failure is logged: later records have it too."""
        with self._lock:
            self._own.note_incarnation(incarnation)

    def note_orderly_end(self) -> None:
        """Record that this life does not end because of the save that it began from.

        A failure is logged: the life counts as ended by it.
        """
        with self._lock:
            try:
                self._own.note_orderly_end()
            except (CheckpointError, OSError) as error:
                logging.warning("the orderly end of this life is not on record: %s", error)

    def remove(self, step: int, incarnation: str = "") -> None:
        """Unpublish every save of ``step``, protected or not, with its host states. LocalTierError.

        Of each ``incarnation``, and in orphans too; see ``ProcessDirectory.remove``.
        """
        del incarnation
        self._change_all("remove from", lambda place: place.remove(step))

    def follow(self, timeline: Timeline) -> None:
        """Record ``timeline``; see ``ProcessDirectory.follow``. LocalTierError."""
        self._change_all("follow a timeline in", lambda place: place.follow(timeline))

    def invalidate_newer(self, than: SaveId, timeline: Timeline | None = None) -> None:
        """Unpublish saves later than the restored ``than``, here and in orphans. LocalTierError.

        See ``ProcessDirectory.invalidate_newer``.
        """
        self._change_all("invalidate in", lambda place: place.invalidate_newer(than, timeline))

    def _change_all(self, operation: str, change: Callable[[ProcessDirectory], None]) -> None:
        with self._lock:
            for place in self._directories():
                try:
                    change(place)
                except OSError as error:
                    raise files.local_error(operation, str(place.claim.path), error) from error

    # The end.

    def close(self) -> None:
        """Release the directory; published saves stay for the next life. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._prefaulter.close(_CLOSE_TIMEOUT_S)
        with self._lock:
            places, self._orphans = [*self._directories(), *self._lost], []
            self._lost = []
        self._close_all(places)

    def _check_open(self, operation: str) -> None:
        if self._closing.is_set():
            raise LocalTierError(operation, str(self.path), "the tier was closed")

    def _mend(self) -> None:
        """Make the directory or slots again that another program removed; their saves are lost.

        The caller holds ``_saving``: a write chooses its slot before the slot is in use.
        LocalTierError when that fails, or another process has claimed the directory.
        """
        with self._lock:
            if self._closing.is_set():
                return
            own = self._own
            if not own.claim.is_in_place() and not own.locked_again(self._start):
                self._own = own.made_again(self._run_dir, self._writer, self._start)
                self._lost.append(own)
            # What is in use keeps its memory until a later call.
            idle = [place for place in self._lost if not any(slot.in_use for slot in place.slots)]
            self._lost = [place for place in self._lost if place not in idle]
            lost_slots = self._own.take_lost_slots()
        self._close_all(idle)
        _delete(lost_slots)

    def _close_all(self, places: Sequence[ProcessDirectory]) -> None:
        with self._lock:
            slots = [slot for place in places for slot in place.slots]
        for slot in slots:
            slot.unmap()
        with self._lock:
            for place in places:
                place.close()


def _delete(taken_out: Iterable[Slot]) -> None:
    """Delete slots that are in no table any more. Blocks: the caller does not hold the lock."""
    for slot in taken_out:
        slot.delete()
