"""Read-only access to a host's ramdisk, for a server that runs while the trainer is down.

It changes no file. A trainer may start at any time: each request looks at the files anew, and a
slot that is written during a read has shards with wrong CRCs.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from absl import logging

from emergency_ckpt import files
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.restore.inventory import HeldHostState, HeldTensors, HolderInventory
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
from emergency_ckpt.ram.process_files import (
    NUMBERS,
    Ledger,
    ProcessFiles,
    Published,
    file_name,
    manifest_name,
    newest_chain,
)
from emergency_ckpt.ram.signatures import Signer
from emergency_ckpt.types import Contents, SaveId

Version = tuple[int, int, int, int]
"""Inode, change and modification time in ns, size in bytes: differs when a file was replaced."""


class ReadOnlyRamdisk:
    """The contents of all process directories of a run. Thread-safe.

    Holds ``reader.lock`` of each directory shared, so that no process deletes it unless a person
    says so; the next request finds directories that appear later. ``address`` is part of the
    inventory.

    ConfigError for an invalid run id, LocalTierError when ``local_dir`` is no directory of
    ``owner_uid`` (None: the effective user). Process directories of other users are not served,
    nor, with a ``signer``, unsigned files.
    """

    def __init__(
        self,
        local_dir: Path,
        run_id: str,
        owner_uid: int | None = None,
        signer: Signer | None = None,
    ) -> None:
        check_run_id(run_id)
        try:
            os.close(open_local_dir(local_dir, owner_uid))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LocalTierError(
                "serve", str(local_dir), "not a directory", hint="name the ramdisk of the trainer"
            ) from error
        except OSError as error:
            raise files.local_error("serve", str(local_dir), error) from error
        self._owner_uid = owner_uid
        self._signer = signer
        self.address = ""
        self._run_dir = local_dir / run_id
        self._run_id = run_id
        self._lock = threading.Lock()
        self._directories: dict[Path, _Directory] = {}
        self._damaged: dict[Path, int | None] = {}

    def inventory(self) -> HolderInventory:
        """Return all that is published now. The holder is ``server/<host:port>``."""
        with self._lock:
            self._refresh()
            places = list(self._directories.values())
            tensors = {
                HeldTensors(save=slot.published.save, digest=slot.published.digest)
                for place in places
                for slot in place.slots.values()
            }
            host_states = {
                (held.save, held.owner, held.count): held
                for place in places
                for held in place.host_states()
            }
            ledgers = [place.ledger() for place in places]
        known = [ledger.complete for ledger in ledgers if ledger.complete is not None]
        return HolderInventory(
            holder=f"server/{self.address.rpartition('@')[2]}",
            process_index=None,
            address=self.address,
            tensors=tuple(sorted(tensors)),
            host_states=tuple(sorted(host_states.values())),
            known_complete=max(known, default=None),
            timeline=newest_chain(ledgers),
            incarnation=max((each.incarnation for each in ledgers), key=number_of, default=""),
        )

    def contents_bytes(self, digest: str) -> bytes | None:
        """Return the canonical encoding whose SHA-256 is ``digest``, or None."""
        with self._lock:
            slot = self._find(digest)
            return slot.published.encoded if slot else None

    @contextmanager
    def mapping_for(self, digest: str) -> Generator[tuple[Mapping, Contents]]:
        """Lend the slot's bytes. A trainer that starts may write to them: compare the CRCs.

        NotHeld when they are not published, or the slot is gone or too short.
        """
        with self._lock:
            slot = self._find(digest)
            if slot is None:
                raise NotHeld("read", f"contents {digest[:12]}", "not published here (any more)")
            mapping = slot.mapping()
        yield mapping, slot.published.contents

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
        """Release the directories that were removed, whose memory is held until then.

        Reads in progress keep theirs.
        """
        with self._lock:
            self._drop_removed()

    def close(self) -> None:
        """Release the directories. Idempotent; reads in progress keep their memory."""
        with self._lock:
            for place in self._directories.values():
                place.close()
            self._directories.clear()

    def _find(self, digest: str) -> _Slot | None:
        """Return the slot that was published last; an older one may have failed verification."""
        self._refresh()
        found = [
            slot
            for place in self._directories.values()
            for slot in place.slots.values()
            if slot.published.digest == digest
        ]
        return max(found, key=lambda slot: slot.version[2], default=None)

    def _refresh(self) -> None:
        present = process_directories(self._run_dir)
        self._drop_removed()
        for path in present:
            if path not in self._directories:
                self._open(path)
        for path, place in list(self._directories.items()):
            try:
                place.refresh()
            except OSError as error:
                self._directories.pop(path).close()
                self._note_damage(path, error)

    def _drop_removed(self) -> None:
        for path in [path for path, place in self._directories.items() if not place.at_its_path()]:
            self._directories.pop(path).close()

    def _open(self, path: Path) -> None:
        try:
            claim = read_claim(path, self._owner_uid)
        except OSError as error:
            self._note_damage(path, error)
            return
        if claim is not None:
            self._directories[path] = _Directory(claim, self._run_id, self._signer)

    def _note_damage(self, path: Path, error: OSError) -> None:
        """Log damage of a directory once; the other directories are served."""
        if self._damaged.get(path) != error.errno:
            self._damaged[path] = error.errno
            logging.warning("%s is not served: %s", path, error)


class _Slot:
    """A published slot, mapped at its first read."""

    def __init__(
        self, number: int, place: ProcessFiles, version: Version, published: Published
    ) -> None:
        self.version = version
        self.published = published
        self._number = number
        self._place = place
        self._mapping: Mapping | None = None

    def mapping(self) -> Mapping:
        if self._mapping is None:
            size_bytes = max(end_of(self.published.contents), mmap.PAGESIZE)
            try:
                fd = self._place.open_slot(self._number, self.published)
                try:
                    self._mapping = Mapping(fd, size_bytes, writable=False)
                finally:
                    os.close(fd)
            except (OSError, ValueError, CorruptData) as error:
                name = file_name(self._number)
                raise NotHeld("map", name, f"the slot cannot be read: {error}") from error
        return self._mapping

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()


class _Directory:
    """One process directory under a reader's lock. Decodes a manifest once per version of it."""

    def __init__(self, claim: ReaderClaim, run_id: str, signer: Signer | None) -> None:
        self.slots: dict[int, _Slot] = {}
        self._claim = claim
        self._files = ProcessFiles(claim.dir_fd, run_id, signer)
        self._bad: dict[int, Version] = {}

    def at_its_path(self) -> bool:
        try:
            there = os.stat(self._claim.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._claim.dir_fd))

    def refresh(self) -> None:
        for number in NUMBERS:
            version = _version(manifest_name(number), self._claim.dir_fd)
            slot = self.slots.get(number)
            if slot is not None and slot.version == version:
                continue
            if slot is not None:
                del self.slots[number]  # its last reader frees the mapping
            if version is None or self._bad.get(number) == version:
                continue
            try:
                published = self._files.manifest(number)
            except CorruptData as error:
                logging.warning("%s is not served: %s", self._claim.path, error)
                self._bad[number] = version
                continue
            # If it was replaced meanwhile, the next request sees another version.
            if published is not None:
                self.slots[number] = _Slot(number, self._files, version, published)

    def ledger(self) -> Ledger:
        try:
            return self._files.ledger()[0]
        except CorruptData as error:
            logging.warning("%s: %s", self._claim.path, error)
            return Ledger()

    def host_states(self) -> Iterator[HeldHostState]:
        for _, found in self._files.host_states():
            if isinstance(found, CorruptData):
                logging.warning("%s is not served: %s", self._claim.path, found)
            else:
                yield found

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
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()
        self._claim.release()


def _version(name: str, dir_fd: int) -> Version | None:
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size
