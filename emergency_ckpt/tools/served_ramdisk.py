"""Read-only access to a host's ramdisk, for a server that runs while the trainer is down.

It changes no file. A trainer may start at any time: each request looks at the files anew, and a
slot that is written during a read has shards with wrong CRCs.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from absl import logging

from emergency_ckpt import files
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.timeline import check_save, number_of
from emergency_ckpt.errors import CorruptData, HostStateError, LocalTierError, NotHeld
from emergency_ckpt.ram.locks import (
    ReaderClaim,
    check_run_id,
    process_directories,
    read_claim,
)
from emergency_ckpt.ram.manifest import end_of
from emergency_ckpt.ram.ownership import open_local_dir
from emergency_ckpt.ram.process_files import ProcessFiles, file_name, newest_chain, newest_stored
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, RamCopy, read_folder, version_of
from emergency_ckpt.types import Contents, SaveId


class ReadOnlyRamdisk:
    """The contents of all process directories of a run. Thread-safe.

    Holds ``reader.lock`` of each directory shared, so that no process deletes it unless a person
    says so; the next request finds directories that appear later. ``address`` is part of the
    inventory.

    ConfigError for an invalid run id, LocalTierError when ``local_dir`` is no directory of
    ``owner_uid`` (None: the effective user). Process directories of other users are not served.
    """

    def __init__(
        self,
        local_dir: Path,
        run_id: str,
        owner_uid: int | None = None,
    ) -> None:
        check_run_id(run_id)
        try:
            os.close(open_local_dir(local_dir, owner_uid))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LocalTierError(
                "serve",
                str(local_dir),
                "not a directory",
                hint="name the ramdisk of the trainer; before its first start, make the directory"
                f" as the trainer's user: mkdir -m 0700 {local_dir}",
            ) from error
        except OSError as error:
            raise files.local_error("serve", str(local_dir), error) from error
        self._places = Places((local_dir,), run_id=run_id, owner_uid=owner_uid)
        self.address = ""
        self._run_dir = local_dir / run_id
        self._lock = threading.Lock()
        self._directories: dict[Path, _Directory] = {}
        self._damaged: dict[Path, int | None] = {}

    def inventory(self) -> HolderInventory:
        """Return all that is published now. The holder is ``server/<host:port>``."""
        with self._lock:
            self._refresh()
            folders = [place.folder for place in self._directories.values()]
        holders = [folder.holder for folder in folders]
        ledgers = [folder.ledger for folder in folders]
        host_states = {
            (host_state.save, host_state.owner, host_state.count): host_state
            for holder in holders
            for host_state in holder.host_states
        }
        known = [ledger.complete for ledger in ledgers if ledger.complete is not None]
        return HolderInventory(
            holder=f"server/{self.address.rpartition('@')[2]}",
            process_index=None,
            address=self.address,
            tensors=tuple(sorted({manifest for holder in holders for manifest in holder.tensors})),
            host_states=tuple(sorted(host_states.values())),
            known_complete=max(known, default=None),
            known_stored=newest_stored(ledgers),
            timeline=newest_chain(ledgers),
            incarnation=max((ledger.incarnation for ledger in ledgers), key=number_of, default=""),
        )

    def contents_bytes(self, digest: str) -> bytes | None:
        """Return the canonical encoding whose SHA-256 is ``digest``, or None."""
        with self._lock:
            slot = self._find(digest)
            return slot[1].published.encoded if slot else None

    @contextmanager
    def mapping_for(self, digest: str) -> Generator[tuple[Mapping, Contents]]:
        """Give the slot's bytes. A trainer that starts may write to these bytes: compare the CRCs.

        NotHeld when the bytes are not published, or the slot is gone or too short.
        """
        with self._lock:
            slot = self._find(digest)
            if slot is None:
                raise NotHeld("read", f"contents {digest[:12]}", "not published here (any more)")
            place, copy = slot
            mapping = place.mapping(copy)
        yield mapping, copy.published.contents

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        """Return the encoded document, or None when not held. The caller checks the digest."""
        check_save(save)
        with self._lock:
            self._refresh()
            for place in self._directories.values():
                data = place.host_state_bytes(save, owner, count)
                if data is not None:
                    return data
        return None

    def publish_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Raise HostStateError: this server writes nothing."""
        raise HostStateError(
            "publish",
            f"host state of process {owner} of {count} at step {save.step} ({len(data)} bytes)",
            "this server only reads",
            hint="push to a process of the job",
        )

    def hold_host_state(self, save: SaveId, owner: int, count: int, data: bytes) -> None:
        """Raise HostStateError: this server saves nothing to storage."""
        self.publish_host_state(save, owner, count, data)

    def let_go(self) -> None:
        """Release the directories and slots that were removed, whose memory is held until then.

        Reads in progress keep theirs.
        """
        with self._lock:
            self._drop_removed()
            # A trainer that saves costs nothing here where none of its slots is mapped.
            self._follow([path for path, place in self._directories.items() if place.maps_slots])

    def close(self) -> None:
        """Release the directories. Idempotent; reads in progress keep their memory."""
        with self._lock:
            for place in self._directories.values():
                place.close()
            self._directories.clear()

    def _find(self, digest: str) -> tuple[_Directory, RamCopy] | None:
        """Return the slot that was published last; an older one may have failed verification."""
        self._refresh()
        slots = [
            (place, copy)
            for place in self._directories.values()
            for copy in place.folder.copies
            if copy.published.digest == digest
        ]
        return max(slots, key=lambda slot: slot[1].saved_s, default=None)

    def _refresh(self) -> None:
        present = process_directories(self._run_dir)
        self._drop_removed()
        for path in present:
            if path not in self._directories:
                self._open(path)
        self._follow(list(self._directories))

    def _follow(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                self._directories[path].refresh()
            except OSError as error:
                self._directories.pop(path).close()
                self._note_damage(path, error)

    def _drop_removed(self) -> None:
        for path in [path for path, place in self._directories.items() if not place.at_its_path()]:
            self._directories.pop(path).close()

    def _open(self, path: Path) -> None:
        claim = None
        try:
            claim = read_claim(path, self._places.owner_uid)
            if claim is not None:
                self._directories[path] = _Directory(claim, self._places)
        except OSError as error:
            if claim is not None:
                claim.release()
            self._note_damage(path, error)

    def _note_damage(self, path: Path, error: OSError) -> None:
        """Log damage of a directory once; the other directories are served."""
        if self._damaged.get(path) != error.errno:
            self._damaged[path] = error.errno
            logging.warning("%s is not served: %s", path, error)


class _Directory:
    """One process directory under a reader's lock, read again when one of its files changed."""

    def __init__(self, claim: ReaderClaim, places: Places) -> None:
        self._claim = claim
        self._places = places
        self._files = ProcessFiles(claim.dir_fd, claim.path.parent.name)
        self._mappings: dict[_Slot, Mapping] = {}
        self.folder = self._read()

    def at_its_path(self) -> bool:
        try:
            there = os.stat(self._claim.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._claim.dir_fd))

    @property
    def maps_slots(self) -> bool:
        return bool(self._mappings)

    def refresh(self) -> None:
        if version_of(self._files) != self.folder.version:
            self.folder = self._read()
            # The last reader of a mapping that is left out frees the mapping.
            left = {_slot_of(copy) for copy in self.folder.copies}
            self._mappings = {
                slot: mapping for slot, mapping in self._mappings.items() if slot in left
            }

    def _read(self) -> ProcessFolder:
        # If a file is replaced meanwhile, the next request sees another version.
        folder = read_folder(self._claim.path, self._files, self._places)
        for fault in folder.faults:
            logging.warning("%s is not served: %s", fault.where, fault.problem)
        return folder

    def mapping(self, copy: RamCopy) -> Mapping:
        """Return the bytes of a slot, mapped at its first read."""
        slot = _slot_of(copy)
        if slot not in self._mappings:
            size_bytes = max(end_of(copy.published.contents), mmap.PAGESIZE)
            try:
                fd = self._files.open_slot(copy.number, copy.published)
                try:
                    self._mappings[slot] = Mapping(fd, size_bytes, writable=False)
                finally:
                    os.close(fd)
            except (OSError, ValueError, CorruptData) as error:
                name = file_name(copy.number)
                raise NotHeld("map", name, f"the slot cannot be read: {error}") from error
        return self._mappings[slot]

    def host_state_bytes(self, save: SaveId, owner: int, count: int) -> bytes | None:
        if save.run_id == self._files.run_id:
            try:
                return self._files.document(save, owner, count)
            except CorruptData as error:
                logging.warning("%s is not served: %s", self._claim.path, error)
            except OSError:
                pass  # not held here
        return None

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
        self._claim.release()


_Slot = tuple[int, str, float]


def _slot_of(copy: RamCopy) -> _Slot:
    return copy.number, copy.published.digest, copy.saved_s
