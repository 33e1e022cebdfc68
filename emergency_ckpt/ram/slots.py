"""Slots: preallocated files of a ramdisk that hold one step of one process each.

A slot's blocks are reserved before it is mapped, so that no write to it causes SIGBUS. A slot
counts while its manifest is published; the manifest is removed before a byte is changed.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from emergency_ckpt import files
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import CorruptData, LocalTierError, MemoryLimitReached, RamdiskFull
from emergency_ckpt.ram.host_memory import new_pages_fit
from emergency_ckpt.ram.locks import Claim
from emergency_ckpt.ram.process_files import (
    ProcessFiles,
    Published,
    file_name,
    manifest_name,
    why_too_short,
)
from emergency_ckpt.state.lending import Lease, LentCount, Loan

_counts_lock = threading.Lock()
# One for each file in the process, shared by a closed tier and the next that opens the directory.
_counts: weakref.WeakValueDictionary[tuple[int, int], LentCount] = weakref.WeakValueDictionary()


class Slot:
    """One slot file, mapped. State is changed only under the lock of the tier that owns it.

    Attributes:
      published: its published contents, or None.
      writing: a ``SlotWriter`` is in use.
      readers: number of peers and verifications that read it now.
      bad_shards: indices of shards that failed verification.
      whole: whether all processes have its save, as their vote or a restore found; None: unknown.
      reserved: False while its file may have holes. A write to its mapping is then forbidden,
        because without room it causes SIGBUS.
      written: its pages were written or cleared before this process opened it.
      made: maps the beginning of a sparse slot, whose pages exist; None without such.
      in_memory: it is a ``MemorySlot``.
    """

    in_memory = False
    reserved = True
    written = False
    whole: bool | None = None
    made: Mapping | None = None

    def __init__(self, number: int, claim: Claim, mapping: Mapping, fd: int) -> None:
        """``fd``: descriptor of the mapped file; only the file's identity is kept."""
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
        self._lease: Callable[[], Lease | None] = _no_lease

    def is_in_place(self) -> bool:
        """Return True when the file is at its name, has the mapping's length and no new holes.

        Another program may have removed or cut it; a write to the mapping could then be a SIGBUS.
        """
        status = self._status()
        if status is None or (status.st_dev, status.st_ino) != self._file:
            return False
        held_bytes = status.st_blocks * 512 if self.reserved else self.size_bytes
        return min(status.st_size, held_bytes) >= self.size_bytes

    def is_cut(self) -> bool:
        """Return True when the file was made shorter: a read of the mapping could be a SIGBUS."""
        status = self._status()
        if status is None or (status.st_dev, status.st_ino) != self._file:
            return False  # removed: mapped memory stays valid
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
        """Return a read-only uint8 array [nbytes]; the slot is lent while a view of it is alive."""
        # One lease for all: making one for each of thousands of shards is slow.
        lease = self._lease()
        if lease is None:
            lease = self._count.lease(self.claim.held)
            self._lease = weakref.ref(lease)
        return Loan(self.mapping, lease).view(offset, nbytes)

    def loan(self) -> Loan:
        """Lend the whole slot. The caller holds the tier's lock."""
        return Loan(self.mapping, self._count.lease(self.claim.held))

    def grow(self, size_bytes: int, *, sparse: bool = False) -> None:
        """Extend the file to at least ``size_bytes``; its bytes stay, also on RamdiskFull.

        Views and readers keep the old mapping alive. With ``sparse`` as in ``make_slot``.
        """
        size_bytes = whole_pages(size_bytes)
        if size_bytes <= self.size_bytes:
            return
        name = file_name(self.number)
        fd = self.open_file()
        try:
            check_room(self.claim, size_bytes - self.size_bytes)
            try:
                if sparse:
                    os.ftruncate(fd, max(size_bytes, os.fstat(fd).st_size))
                else:
                    _reserve(fd, self.size_bytes, size_bytes - self.size_bytes)
            except OSError as error:
                # Free the blocks reserved before the room ran out; no mapping has them yet.
                os.ftruncate(fd, self.size_bytes)
                raise files.local_error("reserve", name, error, size_bytes) from error
            if sparse and self.reserved:
                self.made = self.mapping  # to receive into: its pages may be mapped already
            self.mapping = _map(fd, size_bytes, name)
            self.reserved = self.reserved and not sparse
        finally:
            os.close(fd)

    def open_file(self) -> int:
        """Return a read-write descriptor of the slot's file; the caller closes it."""
        return files.open_regular(file_name(self.number), self.claim.dir_fd, os.O_RDWR)

    def reserve(self) -> None:
        """Fill the holes of a sparse slot. RamdiskFull when there is no room."""
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
        """Remove the manifest: the slot no longer holds a step."""
        files.remove(manifest_name(self.number), self.claim.dir_fd)
        self.published = None
        self.whole = None
        self.bad_shards.clear()
        if self.reserved:
            self.made = None

    def delete(self) -> None:
        """Remove the slot's files. Readers and views keep the memory alive."""
        self.unpublish()
        files.remove(file_name(self.number), self.claim.dir_fd)
        self.mapping.close()


class MemorySlot(Slot):
    """A slot in memory of this process, for a restore that finds no room in the ramdisk.

    It has no files: it ends with the process, so no save may be written to it.
    """

    in_memory = True

    def __init__(self, number: int, claim: Claim, size_bytes: int) -> None:
        """LocalTierError when the system gives no memory."""
        size_bytes = whole_pages(size_bytes)
        try:
            self._fd = os.memfd_create("eckpt-restored", os.MFD_CLOEXEC)
        except OSError as error:
            raise files.local_error("make", "a slot in memory", error, size_bytes) from error
        try:
            os.ftruncate(self._fd, size_bytes)
            super().__init__(number, claim, _map(self._fd, size_bytes, "in memory"), self._fd)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise files.local_error("make", "a slot in memory", error, size_bytes) from error
            raise

    def is_in_place(self) -> bool:
        return True

    def is_cut(self) -> bool:
        return False

    def open_file(self) -> int:
        return os.dup(self._fd)

    def unpublish(self) -> None:
        self.published = None
        self.bad_shards.clear()

    def delete(self) -> None:
        self.unpublish()
        self.mapping.close()
        os.close(self._fd)


def whole_pages(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole pages, at least one: zero cannot be mapped."""
    return max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def check_room(claim: Claim, needed_bytes: int, processes: int = 1) -> None:
    """Raise RamdiskFull with both sizes unless ``needed_bytes`` are free.

    MemoryLimitReached where they are, but a memory limit does not allow as many new pages to each
    of ``processes``, which are about to make theirs on this host.
    """
    available = files.free_bytes(claim.dir_fd)
    if needed_bytes > available:
        raise RamdiskFull(
            "reserve slots in",
            str(claim.path),
            "the ramdisk has no room for them",
            expected=f"{needed_bytes} bytes free",
            actual=f"{available} bytes free",
            hint="enlarge the ramdisk: each process needs two slots of the state that it stores,"
            " and the host states of two saves, its own and those of its buddies",
        )
    fits, reason = new_pages_fit(claim.path, needed_bytes * processes)
    if not fits:
        raise MemoryLimitReached(
            "reserve slots in",
            str(claim.path),
            reason,
            hint="give the job or its container more memory (Slurm: --mem): what it has in the"
            " ramdisk counts in it, beside the program",
        )


def make_slot(number: int, claim: Claim, size_bytes: int, *, sparse: bool = False) -> Slot:
    """Reserve and map a new slot. RamdiskFull, LocalTierError; no file is left on failure.

    The time is proportional to the size. With ``sparse`` it is not: the file has holes, which
    ``Slot.reserve`` or writes to the file fill. Room is checked in both cases.
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
    number: int, claim: Claim, place: ProcessFiles
) -> tuple[Slot | None, CorruptData | None]:
    """Open a slot of an earlier life, with its contents if they are complete.

    The second result is the damage found; it is returned, not raised. A file that can be mapped is
    kept as a free slot. The CRCs of the bytes are not checked here.
    """
    name = file_name(number)
    problem: CorruptData | None = None
    published: Published | None = None
    try:
        published = place.manifest(number)
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
        problem = why_too_short(number, published, slot.size_bytes)
    if slot is not None and published is not None and problem is None:
        slot.published = published
    return slot, problem


def _adopt_file(fd: int, number: int, claim: Claim) -> Slot:
    size_bytes = os.fstat(fd).st_size // mmap.PAGESIZE * mmap.PAGESIZE
    if size_bytes == 0:
        raise CorruptData("open", file_name(number), "less than a page long")
    if os.fstat(fd).st_blocks * 512 < size_bytes:
        # On a full ramdisk the first access to a hole would be a SIGBUS.
        _reserve(fd, 0, size_bytes)
    slot = Slot(number, claim, _map(fd, size_bytes, file_name(number)), fd)
    slot.written = True
    return slot


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


def _no_lease() -> None:
    return None
