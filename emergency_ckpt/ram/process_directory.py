"""One claimed process directory: its slots, host states, ledger, quarantine records.

A host state, the process's own or a copy for a buddy, is one file, whose presence is the marker:
``host_state/<incarnation>-<step>/process_00003_of_00008.json``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
from absl import logging

from emergency_ckpt import files
from emergency_ckpt.core.limits import (
    MAX_DOCUMENTS_BYTES,
    MAX_HOST_STATE_DOCUMENTS,
    MAX_HOST_STATE_SAVES,
    MAX_QUARANTINE_RECORDS,
)
from emergency_ckpt.core.restore.inventory import HeldHostState, RestoredSave
from emergency_ckpt.core.timeline import Timeline, newest
from emergency_ckpt.core.wording import printable
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HostStateError,
    HostStatesFull,
    LocalTierError,
    RamdiskFull,
)
from emergency_ckpt.ram.locks import Claim, Holder, claim_directory
from emergency_ckpt.ram.manifest import Published
from emergency_ckpt.ram.process_files import (
    HOST_STATE_DIRECTORY,
    LEDGER,
    LEDGER_FILE,
    NUMBERS,
    QUARANTINE_DIRECTORY,
    Ledger,
    ProcessFiles,
    file_name,
    held_host_state,
    manifest_name,
    save_directory,
    slot_number,
)
from emergency_ckpt.ram.slot_choice import adds_nothing
from emergency_ckpt.ram.slots import Slot, make_slot, open_slot
from emergency_ckpt.state.host_state import decode_of, document_name
from emergency_ckpt.state.mapped import Mapper
from emergency_ckpt.types import SaveId, Writer


class QuarantineRecord(msgspec.Struct, frozen=True):
    """The reason why a copy is never used again. For people; no code reads it back."""

    directory: str
    name: str
    problem: str
    digest: str | None = None
    shard: int | None = None


class ProcessDirectory:
    """The contents of a claimed directory. Changed under the tier's lock only."""

    def __init__(self, claim: Claim, run_id: str, mapper: Mapper | None = None) -> None:
        """Scan the directory. A damaged file does not raise: it is quarantined with a record.

        OSError when the directory itself cannot be read or written. ``mapper``: as of ``Slot``.
        Whatever is raised, ``claim`` is released then.
        """
        self.claim = claim
        self._mapper = mapper
        self.files = ProcessFiles(claim.dir_fd, run_id)
        self.slots: list[Slot] = []
        self.quarantined: list[QuarantineRecord] = []
        self.ledger = Ledger()
        with contextlib.ExitStack() as opened:
            opened.callback(claim.release)
            files.remove_temporaries(claim.dir_fd)
            self._quarantine_fd = files.ensure_directory(QUARANTINE_DIRECTORY, claim.dir_fd)
            opened.callback(os.close, self._quarantine_fd)
            files.remove_temporaries(self._quarantine_fd)
            self._next_record = len(os.listdir(self._quarantine_fd))
            self.host_states = HostStateStore(self.files, self._report)
            opened.callback(self.host_states.close)
            try:
                self.ledger = self.files.ledger()
            except CorruptData as error:
                self._report(LEDGER, error)
            self._scan_slots()
            opened.pop_all()

    def note_incarnation(self, incarnation: str) -> None:
        """Record that the job has begun a life. A failure is logged: a later record has it too."""
        self.ledger = msgspec.structs.replace(self.ledger, incarnation=incarnation)
        try:
            self._record()
        except (CheckpointError, OSError) as error:
            logging.warning("incarnation %s is not on record: %s", incarnation, error)

    def note_complete(
        self, save: SaveId, *, is_finite: bool = False, lives: int | None = None
    ) -> None:
        """Record, across restarts, that ``save`` is complete, and whether it is known to be finite.

        ``lives``: so many lives in a row began from ``save``; None: ``save`` was not restored now.
        Removes the host states of older saves whose tensors are no longer held.
        """
        finite, restored = save if is_finite else self.ledger.finite, self.ledger.restored
        if lives:
            restored = RestoredSave(save, lives)
        elif isinstance(restored, RestoredSave) and restored.save != save:
            restored = msgspec.UNSET
        self._record(complete=save, finite=finite, restored=restored)
        saves = self.saves()
        self.host_states.note_complete(save, saves)
        self.host_states.remove_if(
            lambda host_state: self.excludes(host_state.save) and host_state.save not in saves
        )

    def note_stored(self, save: SaveId) -> None:
        """Record that ``save`` is complete in storage. RamdiskFull, LocalTierError."""
        self._record(stored=save)

    def note_orderly_end(self) -> None:
        """Record that this life was not ended by the save that it began from."""
        if isinstance(self.ledger.restored, RestoredSave):
            self._record(restored=msgspec.UNSET)

    @property
    def finite(self) -> SaveId | None:
        """Return the newest save that is known to be finite, if a slot holds it and it counts."""
        save = self.ledger.finite
        if isinstance(save, SaveId) and save in self.saves() and not self.excludes(save):
            return save
        return None

    def excludes(self, save: SaveId) -> bool:
        """Return whether the chain on record excludes ``save``."""
        chain = self.ledger.chain
        return chain is not None and bool(chain.rejection_reason(save.step, save.incarnation))

    def _record(self, **changes: Any) -> None:
        """Write the ledger with these fields changed. RamdiskFull, LocalTierError."""
        ledger = msgspec.structs.replace(self.ledger, **changes)
        files.write_atomic(LEDGER, self.claim.dir_fd, LEDGER_FILE.encode(ledger))
        self.ledger = ledger

    def follow(self, timeline: Timeline) -> None:
        """Record ``timeline``, and unpublish what was rolled back.

        A save that ``timeline`` only leaves behind stays published until the slot is needed.
        """
        self._record(chain=timeline)
        self._forget(
            lambda save: self.excludes(save) and not timeline.leaves_behind(save.incarnation)
        )

    def _forget(self, unwanted: Callable[[SaveId], bool]) -> None:
        """Unpublish the saves for which ``unwanted`` is true, with their host states."""
        for slot, published in self.published():
            if unwanted(published.save):
                slot.unpublish()
        self.host_states.remove_if(lambda host_state: unwanted(host_state.save))

    def published(self) -> list[tuple[Slot, Published]]:
        """Return the slots that hold a save, and what they hold."""
        return [(slot, slot.published) for slot in self.slots if slot.published is not None]

    def saves(self) -> set[SaveId]:
        """Return the saves that the slots hold."""
        return {published.save for _, published in self.published()}

    def make_slot(self, size_bytes: int) -> Slot:
        """Reserve one more slot; the caller adds it to ``slots``. RamdiskFull, LocalTierError."""
        taken = {slot.number for slot in self.slots} | self._numbers_on_disk()
        return make_slot(min(set(NUMBERS) - taken), self.claim, size_bytes, self._mapper)

    def take_out(self, slots: Iterable[Slot]) -> list[Slot]:
        """Take ``slots`` out, with their saves; return those that were not out already.

        The caller calls ``Slot.delete`` for what is returned, without the lock.
        """
        taken = [slot for slot in slots if slot in self.slots]
        for slot in taken:
            self.slots.remove(slot)
            slot.unpublish()
        return taken

    def drop_twins(self, of: Slot) -> None:
        """Unpublish every other slot with the digest of ``of``, which was published last.

        Such a slot failed verification, or its shards were fetched again. The next life, which
        knows of no damage, would find it and might prefer it.
        """
        for slot, published in self.published():
            if slot is not of and of.published and published.digest == of.published.digest:
                slot.unpublish()

    def _drop_contained(self) -> None:
        """Unpublish each slot whose shards a later slot of the same save all has.

        A crash may have prevented that the older one was unpublished.
        """

        def published_ns(pair: tuple[Slot, Published]) -> int:
            name = manifest_name(pair[0].number)
            return os.stat(name, dir_fd=self.claim.dir_fd, follow_symlinks=False).st_mtime_ns

        in_order = sorted(self.published(), key=published_ns)
        for number, (_, new) in enumerate(in_order):
            for slot, old in in_order[:number]:
                if old.digest == new.digest or adds_nothing(old.contents, new.contents):
                    slot.unpublish()

    def invalidate_newer(self, than: SaveId, timeline: Timeline | None = None) -> None:
        """Unpublish saves after ``than``, and other incarnations of its step.

        Saves that ``timeline``, or a newer timeline on record, leaves behind stay: nobody can take
        these saves for newer ones. A record of a later complete save is replaced by ``than``, or
        removed when ``than`` has no incarnation, which means that there is none.
        """
        chain = newest(self.ledger.chain, timeline)

        def newer(save: SaveId) -> bool:
            return save.step > than.step or (save.step == than.step and save != than)

        self._forget(
            lambda save: newer(save) and not (chain and chain.leaves_behind(save.incarnation))
        )
        if self.ledger.complete is not None and newer(self.ledger.complete):
            try:
                self._record(complete=than if than.incarnation else None)
            except RamdiskFull as error:
                # The record tells a loss of everything from a fresh start, with any step in it.
                logging.warning("step %d stays on record as complete: %s", than.step, error)

    def remove(self, step: int) -> None:
        """Unpublish every save of ``step`` with its host states.

        If ``step`` was on record as complete, the newest other save takes its place: of the saves
        that are known to be complete, else of those that may be. Without a record the loss of these
        saves would look like a fresh start.
        """
        self._forget(lambda save: save.step == step)
        complete = self.ledger.complete
        if not self.published():
            self.invalidate_newer(SaveId(-1, "", self.files.run_id))
        elif complete is not None and complete.step == step:
            saves = [
                (slot.whole, published.save)
                for slot, published in self.published()
                if not self.excludes(published.save)
            ]
            whole = [save for is_whole, save in saves if is_whole]
            unknown = [save for is_whole, save in saves if is_whole is None]
            self._record(complete=max(whole or unknown, default=None))

    def quarantine(self, record: QuarantineRecord) -> None:
        """Keep a record in memory, in the log and, where there is room, in one of 64 small files.

        The caller removes the copy itself.
        """
        # A name may have bytes that are no text, which JSON cannot have.
        record = msgspec.structs.replace(
            record,
            directory=printable(record.directory),
            name=printable(record.name),
            problem=printable(record.problem),
        )
        self.quarantined.append(record)
        logging.warning("quarantined %s in %s: %s", record.name, record.directory, record.problem)
        name = f"{self._next_record % MAX_QUARANTINE_RECORDS:02d}.json"
        self._next_record += 1
        try:
            data = msgspec.json.encode(record, order="sorted")
            files.write_atomic(name, self._quarantine_fd, data)
        except CheckpointError as error:
            logging.warning("no quarantine record was written: %s", error)

    def locked_again(self, start: str) -> bool:
        """Return whether only the lock file was removed, which is made again: all slots stay.

        LocalTierError when another process has the directory, or the lock cannot be made.
        """
        try:
            is_locked = self.claim.lock_again(start)
        except OSError as error:
            raise files.local_error("lock again", str(self.claim.path), error) from error
        if is_locked:
            logging.warning("the lock of %s was removed, and is made again", self.claim.path)
        return is_locked

    def made_again(self, run_dir: Path, writer: Writer, start: str) -> ProcessDirectory:
        """Claim and return a directory in place of this one, which another program removed.

        The caller then closes this one. LocalTierError; this directory then stays as it is.
        """
        logging.warning("%s was removed while the job runs; it is made again", self.claim.path)
        claim = claim_directory(run_dir.parent, run_dir.name, writer.process_index, start)
        if isinstance(claim, Holder):
            raise LocalTierError(
                "make again", str(claim.path), f"{claim.describe()} has taken the directory"
            )
        try:
            made = ProcessDirectory(claim, self.files.run_id, self._mapper)
        except OSError as error:
            raise files.local_error("make again", str(claim.path), error) from error
        made.quarantined.extend(self.quarantined)
        made.ledger = msgspec.structs.replace(self.ledger, complete=None)
        made.note_incarnation(self.ledger.incarnation)
        return made

    def take_lost_slots(self) -> list[Slot]:
        """Take out the slots whose files another program removed or cut; their saves are lost.

        The caller deletes them as those of ``take_out``.
        """
        lost = [slot for slot in self.slots if not (slot.in_use or slot.is_in_place())]
        for slot in lost:
            logging.warning("slot %d in %s was removed or cut", slot.number, self.claim.path)
        return self.take_out(lost)

    def close(self) -> None:
        """Give up the slots, and release the lock. The caller has called ``Slot.unmap``."""
        for slot in self.slots:
            slot.close()
        self._close_parts()
        self.claim.release()

    def delete(self) -> bool:
        """Delete the directory; return False when a reader serves it: it then stays, released."""
        self._close_parts()
        return self.claim.delete()

    def _close_parts(self) -> None:
        self.slots.clear()
        self.ledger = Ledger()
        self.host_states.close()
        os.close(self._quarantine_fd)
        self._quarantine_fd = -1

    def _scan_slots(self) -> None:
        for number in sorted(self._numbers_on_disk()):
            slot, problem = open_slot(number, self.claim, self.files, self._mapper)
            if problem is not None:
                self._report(manifest_name(number), problem)
            holds_a_save = slot is not None and slot.published is not None
            usable = holds_a_save or self._removed(manifest_name(number))
            if slot is not None and usable:
                self.slots.append(slot)
            else:
                self._removed(file_name(number))
        self._drop_contained()

    def _numbers_on_disk(self) -> set[int]:
        """Return the numbers of the slots that have a file or a manifest."""
        names = os.listdir(self.claim.dir_fd)
        return {number for name in names if (number := slot_number(name)) is not None}

    def _removed(self, name: str) -> bool:
        """Remove a slot's name; return False where it stays, and its number is not used."""
        try:
            return files.remove_file(name, self.claim.dir_fd)
        except PermissionError:
            return False

    def _report(self, name: str, error: CheckpointError) -> None:
        directory = str(self.claim.path)
        self.quarantine(QuarantineRecord(directory=directory, name=name, problem=str(error)))


Key = tuple[SaveId, int, int]


class HostStateStore:
    """The published host states of one directory. Thread-safe. Peers are not trusted.

    Peers push into it, so saves, documents and bytes are bounded: the oldest saves are removed
    first; a document that still does not fit is refused.
    """

    def __init__(
        self,
        place: ProcessFiles,
        report: Callable[[str, CheckpointError], None],
    ) -> None:
        """Scan the directory; report each damaged document and remove it."""
        self._place = place
        self._lock = threading.Lock()
        self._held: dict[Key, HeldHostState] = {}
        self._complete: SaveId | None = None
        self._dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, place.dir_fd)
        for name, document in place.host_states():
            if not isinstance(document, CorruptData):
                self._held[document.save, document.owner, document.count] = document
                continue
            report(name, document)
            with contextlib.suppress(OSError):  # the file stays, damaged at the next scan too
                self._remove_file(name)
        for name in os.listdir(self._dir_fd):
            try:
                self._tidy(name)
            except OSError as error:
                problem = CorruptData("open", name, f"not a directory of host states: {error}")
                report(name, problem)

    def publish(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Publish a document; it survives the end of every process on the host.

        CorruptData when it is not the document of that save and owner, HostStateError when it is
        another run's or differs from the held one, RamdiskFull when there is no room,
        HostStatesFull at the bound of this store, which no room in the ramdisk changes.
        """
        document = decode_of(save, owner, count, data)
        if save.run_id != self._place.run_id:
            raise HostStateError(
                "publish", f"host state of step {save.step}", "another run's", actual=save.run_id
            )
        entry = held_host_state(document, len(data))
        with self._lock:
            key = (save, owner, count)
            published = self._held.get(key)
            if published == entry and self._read(save, owner, count) == data:
                return
            if published is not None and published.digest != entry.digest:
                raise HostStateError(
                    "publish",
                    f"{document_name(owner, count)} of step {save.step}",
                    "another one is published already",
                    expected=published.digest,
                    actual=entry.digest,
                )
            try:
                self._mend()
            except OSError as error:
                raise files.local_error(
                    "publish in", HOST_STATE_DIRECTORY, error, dir_fd=self._dir_fd
                ) from error
            self._make_room(save, len(data))
            try:
                save_fd = files.ensure_directory(save_directory(save), self._dir_fd)
            except OSError as error:
                raise files.local_error(
                    "publish", save_directory(save), error, dir_fd=self._dir_fd
                ) from error
            with files.closing(save_fd):
                files.write_atomic(document_name(owner, count), save_fd, data)
            self._held[key] = entry

    def read(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return a document's bytes, or None when not held. The caller checks the digest."""
        with self._lock:
            return self._read(save, owner, count)

    def held(self) -> tuple[HeldHostState, ...]:
        """Return all published host states, sorted."""
        with self._lock:
            return tuple(sorted(self._held.values()))

    def note_complete(self, save: SaveId, still_published: Collection[SaveId]) -> None:
        """Remove the documents of saves before ``save``, except those in ``still_published``.

        The documents of ``save`` are never removed to make room.
        """
        with self._lock:
            self._complete = save
            outdated = [
                key
                for key in self._held
                if key[0] != save and key[0].step <= save.step and key[0] not in still_published
            ]
            self._remove(outdated)

    def remove_if(self, unwanted: Callable[[HeldHostState], bool]) -> None:
        """Remove the documents for which ``unwanted`` is true."""
        with self._lock:
            self._remove([key for key, entry in self._held.items() if unwanted(entry)])

    def close(self) -> None:
        """Close the directory; later calls find no documents."""
        with self._lock:
            self._held.clear()
            os.close(self._dir_fd)
            self._dir_fd = -1

    def _read(self, save: SaveId, owner: int, count: int) -> bytes | None:
        if (save, owner, count) not in self._held:
            return None
        try:
            return self._place.document(save, owner, count)
        except (OSError, CorruptData):
            return None  # removed or replaced by another program

    def _mend(self) -> None:
        """Make the directory again when another program removed it; its documents are lost."""
        if os.fstat(self._dir_fd).st_nlink > 0:
            return
        dir_fd = files.ensure_directory(HOST_STATE_DIRECTORY, self._place.dir_fd)
        os.close(self._dir_fd)
        self._dir_fd = dir_fd
        self._held.clear()

    def _make_room(self, save: SaveId, size_bytes: int) -> None:
        """Remove saves older than ``save`` until one more document is within the bounds."""
        while True:
            saves = {key[0] for key in self._held}
            total = sum(entry.size_bytes for entry in self._held.values())
            if (
                len(saves | {save}) <= MAX_HOST_STATE_SAVES
                and len(self._held) < MAX_HOST_STATE_DOCUMENTS
                and total + size_bytes <= MAX_DOCUMENTS_BYTES
            ):
                return
            older = {other for other in saves if other < save and other != self._complete}
            if not older:
                raise HostStatesFull(
                    "publish host state in",
                    f"{len(self._held)} documents of {len(saves)} saves",
                    "the store is full of newer ones",
                    expected=f"at most {MAX_HOST_STATE_SAVES} saves, {MAX_HOST_STATE_DOCUMENTS}"
                    f" documents and {MAX_DOCUMENTS_BYTES} bytes",
                    actual=f"{total} bytes",
                )
            oldest = min(older)
            self._remove([key for key in self._held if key[0] == oldest])

    def _remove(self, keys: list[Key]) -> None:
        for key in keys:
            del self._held[key]
            save, owner, count = key
            with contextlib.suppress(FileNotFoundError):
                self._remove_file(f"{save_directory(save)}/{document_name(owner, count)}")
        for save in {key[0] for key in keys} - {key[0] for key in self._held}:
            with contextlib.suppress(OSError):  # another file is in it
                os.rmdir(save_directory(save), dir_fd=self._dir_fd)

    def _remove_file(self, name: str) -> None:
        """Remove a document by its path below this directory. OSError."""
        save_name, _, file_name = name.partition("/")
        with files.closing(files.open_inner(save_name, self._dir_fd)) as save_fd:
            files.remove(file_name, save_fd)

    def _tidy(self, save_name: str) -> None:
        """Remove what an interrupted write left, and the directory of a save without a file."""
        with files.closing(files.open_inner(save_name, self._dir_fd)) as save_fd:
            files.remove_temporaries(save_fd)
            empty = not os.listdir(save_fd)
        if empty:
            os.rmdir(save_name, dir_fd=self._dir_fd)
