"""Slots: preallocated files of a ramdisk that hold one step of one process each.

A slot's blocks are reserved before it is mapped, so that no write to it can end in SIGBUS. A slot
counts only while its manifest is published; the manifest is removed before a byte is changed.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import MAX_MANIFEST_BYTES
from emergency_ckpt.errors import CorruptData, LocalTierError, RamdiskFull
from emergency_ckpt.tiers import files
from emergency_ckpt.tiers.local.manifest import decode_manifest, end_of
from emergency_ckpt.tiers.local.signatures import (
    OVERHEAD_BYTES,
    Signer,
    check_believed,
    open_signed,
)
from emergency_ckpt.tiers.ramdisk.locks import Claim, LockedDirectory
from emergency_ckpt.types import Contents, SaveId

NUMBERS = range(100)
"""Numbers that a slot may have: at most two digits."""


class Published(msgspec.Struct, frozen=True):
    """What a slot holds: the contents, and their encoding, whose SHA-256 is ``digest``."""

    digest: str
    encoded: bytes
    contents: Contents

    @property
    def save(self) -> SaveId:
        return self.contents.save


class LentCount:
    """How many views of a slot are alive.

    Views die in any thread, in a garbage collection that may run while the same thread holds a
    lock, and at interpreter exit. So their end is only an append to a deque, which takes no lock;
    the thread that asks counts them off. One per file in the process, shared by a tier that was
    closed and the next one that opens the directory.
    """

    def __init__(self) -> None:
        self._lent = 0
        self._returned: deque[None] = deque()

    def lease(self, claim: Claim) -> object:
        """An owner for one view. The caller holds the tier's lock."""
        lease = _Lease(self, claim.held)
        weakref.finalize(lease, self._returned.append, None).atexit = False
        self._lent += 1
        return lease

    def alive(self) -> int:
        """Views that are still alive. The caller holds the tier's lock."""
        while self._returned:
            self._returned.popleft()
            self._lent -= 1
        return self._lent


class _Lease:
    """Keeps the count, and the lock on the directory, while a view is alive."""

    __slots__ = ("__weakref__", "_count", "_held")

    def __init__(self, count: LentCount, held: LockedDirectory) -> None:
        self._count = count
        self._held = held


_counts_lock = threading.Lock()
_counts: weakref.WeakValueDictionary[tuple[int, int], LentCount] = weakref.WeakValueDictionary()


class Slot:
    """One slot file, mapped. State is changed only under the lock of the tier that owns it.

    Attributes:
      published: what it holds, None when nothing counts.
      writing: a ``SlotWriter`` is at work in it.
      readers: how many peers, or verifications, read it now.
      bad_shards: indices of shards that failed verification.
      reserved: False while its file may have holes. Nothing may be written to its mapping then:
        without room that would be a SIGBUS.
    """

    reserved = True

    def __init__(self, number: int, claim: Claim, mapping: Mapping, fd: int) -> None:
        """``fd``: the mapped file, of which only the identity is kept."""
        status = os.fstat(fd)
        self._file = (status.st_dev, status.st_ino)
        self.number = number
        self.claim = claim
        self.mapping = mapping
        self.published: Published | None = None
        self.writing = False
        self.readers = 0
        self.bad_shards: set[int] = set()
        self._count = _count_for(self._file)

    def is_in_place(self) -> bool:
        """Whether its file is still at its name, as long as its mapping and without new holes.

        Somebody may have removed or cut it: a write to the mapping could be a SIGBUS then.
        """
        status = self._status()
        if status is None or (status.st_dev, status.st_ino) != self._file:
            return False
        held_bytes = status.st_blocks * 512 if self.reserved else self.size_bytes
        return min(status.st_size, held_bytes) >= self.size_bytes

    def is_cut(self) -> bool:
        """Whether its file was made shorter: reading the mapping could be a SIGBUS."""
        status = self._status()
        if status is None or (status.st_dev, status.st_ino) != self._file:
            return False  # removed: the memory stays as long as it is mapped
        return status.st_size < self.size_bytes

    def _status(self) -> os.stat_result | None:
        try:
            name = file_name(self.number)
            return os.stat(name, dir_fd=self.claim.dir_fd, follow_symlinks=False)
        except OSError:
            return None

    @property
    def size_bytes(self) -> int:
        return self.mapping.size_bytes

    @property
    def lent(self) -> bool:
        return self._count.alive() > 0

    def lend(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Read-only view of the bytes; the slot is lent until it and all made from it are gone."""
        if nbytes == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        return self.mapping.view(offset, nbytes, self._count.lease(self.claim))

    def grow(self, size_bytes: int) -> None:
        """Make the file at least this long; its bytes stay. ``RamdiskFull`` leaves it as it was.

        Views and readers of the old mapping keep it; it goes when they do.
        """
        size_bytes = whole_pages(size_bytes)
        if size_bytes <= self.size_bytes:
            return
        name = file_name(self.number)
        fd = self.open_file()
        try:
            check_room(self.claim, size_bytes - self.size_bytes)
            try:
                _reserve(fd, self.size_bytes, size_bytes - self.size_bytes)
            except OSError as error:
                # Give back what was taken before the room ran out; nothing maps it yet.
                os.ftruncate(fd, self.size_bytes)
                raise files.local_error("reserve", name, error, size_bytes) from error
            self.mapping = _map(fd, size_bytes, name)
        finally:
            os.close(fd)

    def open_file(self) -> int:
        """A descriptor of the slot's file, for reading and writing; the caller closes it."""
        return files.open_regular(file_name(self.number), self.claim.dir_fd, os.O_RDWR)

    def reserve(self) -> None:
        """Fill the holes of a sparse slot. ``RamdiskFull`` when there is no room."""
        if self.reserved:
            return
        fd = self.open_file()
        try:
            if os.fstat(fd).st_blocks * 512 < self.size_bytes:
                _reserve(fd, 0, self.size_bytes)
        except OSError as error:
            name = file_name(self.number)
            raise files.local_error("reserve", name, error, self.size_bytes) from error
        finally:
            os.close(fd)
        self.reserved = True

    def unpublish(self) -> None:
        """Remove the manifest: from here on the slot holds nothing that counts."""
        files.remove(manifest_name(self.number), self.claim.dir_fd)
        self.published = None
        self.bad_shards.clear()

    def delete(self) -> None:
        """Remove the slot's files. Memory that readers and views still use goes when they do."""
        self.unpublish()
        files.remove(file_name(self.number), self.claim.dir_fd)
        self.mapping.close()


def file_name(number: int) -> str:
    """Name of a slot file."""
    return f"slot_{number}.bin"


def manifest_name(number: int) -> str:
    """Name of the manifest that makes a slot count."""
    return f"slot_{number}.manifest.json"


def whole_pages(size_bytes: int) -> int:
    """Size of the slot for so many bytes: whole pages, at least one (nothing can map zero)."""
    return max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def check_room(claim: Claim, needed_bytes: int) -> None:
    """``RamdiskFull`` with both sizes unless so many bytes are free."""
    available = files.free_bytes(claim.dir_fd)
    if needed_bytes > available:
        raise RamdiskFull(
            "reserve slots in",
            str(claim.path),
            "the ramdisk has no room for them",
            expected=f"{needed_bytes} bytes free",
            actual=f"{available} bytes free",
            hint="enlarge the ramdisk (two slots of the state stored per process are needed)",
        )


def make_slot(number: int, claim: Claim, size_bytes: int, *, sparse: bool = False) -> Slot:
    """Reserve and map a new slot. ``RamdiskFull``, ``LocalTierError``; nothing is left on failure.

    Takes time in proportion to the size, but not with ``sparse``: then the file has holes, which
    ``Slot.reserve`` or writes to the file fill. The check for room is made in any case.
    """
    size_bytes = whole_pages(size_bytes)
    check_room(claim, size_bytes)
    name = file_name(number)
    try:
        fd = files.open_regular(name, claim.dir_fd, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise files.local_error("make slot", name, error) from error
    try:
        if sparse:
            os.ftruncate(fd, size_bytes)
        else:
            _reserve(fd, 0, size_bytes)
        slot = Slot(number, claim, _map(fd, size_bytes, name), fd)
        slot.reserved = not sparse
        return slot
    except BaseException as error:
        files.remove(name, claim.dir_fd)
        if isinstance(error, OSError):
            raise files.local_error("reserve", name, error, size_bytes) from error
        raise
    finally:
        os.close(fd)


def open_slot(
    number: int, claim: Claim, run_id: str, signer: Signer | None = None
) -> tuple[Slot | None, CorruptData | None]:
    """A slot that an earlier life left, with what it holds if that is whole.

    Never raises for what it finds: the second result says what is wrong. The file itself is
    kept as room for a later save where it can be mapped. The bytes' CRCs are not checked here.
    """
    name = file_name(number)
    problem: CorruptData | None = None
    published: Published | None = None
    try:
        published = read_manifest(number, claim.dir_fd, run_id, signer)
    except CorruptData as error:
        problem = error
    slot: Slot | None = None
    try:
        fd = files.open_regular(name, claim.dir_fd, os.O_RDWR)
        try:
            slot = _adopt_file(fd, number, claim)
        finally:
            os.close(fd)
    except (OSError, CorruptData, LocalTierError) as error:
        absent = isinstance(error, FileNotFoundError)
        if not absent or published is not None:
            problem = problem or CorruptData("open", name, f"the slot cannot be used: {error}")
    if published is not None and slot is not None:
        problem = _why_too_short(slot, published)
    if slot is not None and published is not None and problem is None:
        slot.published = published
    return slot, problem


def read_manifest(
    number: int, dir_fd: int, run_id: str, signer: Signer | None = None
) -> Published | None:
    """What a slot's manifest says; None without one. ``CorruptData``, also for another run's.

    NotSigned for one that is sound and not signed with the secret of ``signer``.
    """
    name = manifest_name(number)
    try:
        data = files.read_bounded(name, dir_fd, MAX_MANIFEST_BYTES + OVERHEAD_BYTES)
    except FileNotFoundError:
        return None
    file, doubt = open_signed(name, data, signer)
    manifest, encoded = decode_manifest(file)
    found = manifest.contents.save.run_id
    if found != run_id:
        raise CorruptData("open", name, "another run's manifest", expected=run_id, actual=found)
    check_believed(name, doubt)
    return Published(digest=manifest.contents_digest, encoded=encoded, contents=manifest.contents)


def _adopt_file(fd: int, number: int, claim: Claim) -> Slot:
    size_bytes = os.fstat(fd).st_size // mmap.PAGESIZE * mmap.PAGESIZE
    if size_bytes == 0:
        raise CorruptData("open", file_name(number), "less than a page long")
    if os.fstat(fd).st_blocks * 512 < size_bytes:
        # A hole would be a SIGBUS at the first touch when the ramdisk is full.
        _reserve(fd, 0, size_bytes)
    return Slot(number, claim, _map(fd, size_bytes, file_name(number)), fd)


def _why_too_short(slot: Slot, published: Published) -> CorruptData | None:
    needed = end_of(published.contents)
    if needed <= slot.size_bytes:
        return None
    return CorruptData(
        "open",
        file_name(slot.number),
        "the slot is shorter than its manifest says",
        expected=f"at least {needed} bytes",
        actual=f"{slot.size_bytes} bytes",
    )


def _reserve(fd: int, offset: int, nbytes: int) -> None:
    if nbytes:
        os.posix_fallocate(fd, offset, nbytes)


def _map(fd: int, size_bytes: int, name: str) -> Mapping:
    try:
        return Mapping(fd, size_bytes, writable=True)
    except (OSError, ValueError) as error:
        raise LocalTierError(
            "map", name, str(error), hint="is there address space left?"
        ) from error


def _count_for(key: tuple[int, int]) -> LentCount:
    with _counts_lock:
        count = _counts.get(key)
        if count is None:
            count = _counts[key] = LentCount()
        return count
