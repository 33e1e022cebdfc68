"""Slots: preallocated files of a ramdisk that hold one step of one process each.

A slot's blocks are reserved before it is mapped, so that no write to it causes SIGBUS. A slot
counts while its manifest is published; the manifest is removed before a byte is changed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from absl import logging

from emergency_ckpt import files
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import (
    CorruptData,
    DeadlineExceeded,
    LocalTierError,
    MemoryLimitReached,
    RamdiskFull,
)
from emergency_ckpt.ram.host_memory import new_pages_fit
from emergency_ckpt.ram.locks import Claim
from emergency_ckpt.ram.manifest import Published
from emergency_ckpt.ram.prefault import SlotMemory
from emergency_ckpt.ram.process_files import (
    ProcessFiles,
    file_name,
    manifest_name,
    why_too_short,
)
from emergency_ckpt.state.mapped import MappedMemory, Mapper
from emergency_ckpt.state.pins import Pins
from emergency_ckpt.types import SaveId

_MAP_TIMEOUT_S = 30.0
"""Within which a mapper maps one piece, or does not work."""
_UNMAP_TIMEOUT_S = 30.0
_kept: list[npt.NDArray[np.uint8]] = []
"""Memory that a device did not let go of."""


class Slot:
    """One slot file, mapped. Its attributes change only under the lock of the tier that owns it.

    Attributes:
      published: the published contents, or None.
      writing: a ``SlotWriter`` is in use.
      readers: number of peers, verifications and restores that read the slot now.
      pins: of saves to storage that write from the slot.
      bad_shards: indices of shards that failed verification.
      whole: whether all processes have the save, as their vote or a restore found; None: unknown.
      written: the pages were written or cleared before this process opened the slot.
      mapped: what of the memory is mapped for the devices' DMA.
    """

    written = False
    whole: bool | None = None

    def __init__(
        self, number: int, claim: Claim, mapping: Mapping, fd: int, mapper: Mapper | None = None
    ) -> None:
        """``fd``: of the mapped file, for its identity alone. ``mapper``: None maps nothing."""
        status = os.fstat(fd)
        self._file = (status.st_dev, status.st_ino)
        self.number = number
        self.claim = claim
        self.mapping = mapping
        self._mapper = mapper
        self.mapped = _unmapped(mapper, mapping)
        self._given_up: MappedMemory | None = None
        self.published: Published | None = None
        self.writing = False
        self.readers = 0
        self.pins = Pins()
        self.bad_shards: set[int] = set()

    @property
    def save(self) -> SaveId | None:
        return self.published.save if self.published else None

    @property
    def digest(self) -> str | None:
        return self.published.digest if self.published else None

    @property
    def in_use(self) -> bool:
        """Return whether somebody writes or reads the slot now, under the tier's lock."""
        return self.writing or self.readers > 0 or self.pins.count() > 0

    def is_in_place(self) -> bool:
        """Return True when the file is at its name, has the mapping's length and no new holes.

        Another program may have removed or cut it; a write to the mapping could then be a SIGBUS.
        """
        status = self._status()
        if status is None:
            return False
        return min(status.st_size, status.st_blocks * 512) >= self.size_bytes

    def is_cut(self) -> bool:
        """Return True when the file was made shorter: a read of the mapping could be a SIGBUS.

        The memory of a file that was removed stays valid.
        """
        status = self._status()
        return status is not None and status.st_size < self.size_bytes

    def _status(self) -> os.stat_result | None:
        """Return the status of the file; None when it is not at its name."""
        try:
            name = file_name(self.number)
            status = os.stat(name, dir_fd=self.claim.dir_fd, follow_symlinks=False)
        except OSError:
            return None
        return status if (status.st_dev, status.st_ino) == self._file else None

    @property
    def size_bytes(self) -> int:
        return self.mapping.size_bytes

    def grow(self, size_bytes: int) -> None:
        """Extend the file to at least ``size_bytes``; its bytes stay, also on RamdiskFull."""
        size_bytes = whole_pages(size_bytes)
        if size_bytes <= self.size_bytes:
            return
        name = file_name(self.number)
        with files.closing(files.open_regular(name, self.claim.dir_fd, os.O_RDWR)) as fd:
            check_room(self.claim, size_bytes - self.size_bytes)
            try:
                os.posix_fallocate(fd, self.size_bytes, size_bytes - self.size_bytes)
            except OSError as error:
                # Free the blocks reserved before the room ran out; no mapping has them yet.
                os.ftruncate(fd, self.size_bytes)
                raise files.local_error(
                    "reserve", name, error, size_bytes, dir_fd=self.claim.dir_fd
                ) from error
            mapping = _map(fd, size_bytes, name)
        self.unmap()
        self.mapping, self.mapped = mapping, _unmapped(self._mapper, mapping)

    def wanted(self, places: Iterable[tuple[int, int]] = ()) -> SlotMemory:
        """Note that the memory is about to be mapped for DMA, and return it for the ``Prefaulter``.

        ``places``: (offset, nbytes) of what a save will put here. Contents that are published count
        instead.
        """
        if self.published is not None:
            places = [(entry.offset, entry.nbytes) for entry in self.published.contents.shards]
        self.mapped.want(places)
        return SlotMemory(self.mapping, self.mapped, self.written)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy, 64-byte aligned with ``offset``.

        Waits for memory that is about to be mapped for DMA.
        """
        self.mapped.wait(offset, nbytes, _MAP_TIMEOUT_S)
        return self.mapping.view(offset, nbytes, self)

    def unmap(self) -> None:
        """Unmap the memory from DMA, once no device uses the memory. Idempotent.

        Blocks: the caller does not hold the tier's lock. If a device does not end its transfer, the
        memory stays mapped for the life of this process.
        """
        if self._given_up is self.mapped:
            return
        self._given_up = self.mapped
        try:
            self.mapped.unmap(_UNMAP_TIMEOUT_S)
        except (DeadlineExceeded, LocalTierError) as error:
            logging.warning("slot %d keeps its memory: %s", self.number, error)
            _kept.append(self.mapping.view(0, self.size_bytes, None))

    def close(self) -> None:
        """Give the memory up, which readers and views keep. Blocks as ``unmap``."""
        self.unmap()
        self.mapping.close()

    def unpublish(self) -> None:
        """Remove the manifest: the slot no longer holds a step."""
        files.remove(manifest_name(self.number), self.claim.dir_fd)
        self.published = None
        self.whole = None
        self.bad_shards.clear()

    def delete(self) -> None:
        """Unmap the slot, which is not published, and remove its file. Blocks as ``unmap``."""
        self.unmap()
        files.remove(file_name(self.number), self.claim.dir_fd)
        self.close()


def whole_pages(size_bytes: int) -> int:
    """Return ``size_bytes`` rounded up to whole pages, at least one: zero cannot be mapped."""
    return max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def check_room(claim: Claim, needed_bytes: int, processes: int = 1) -> None:
    """Raise RamdiskFull with both sizes unless ``needed_bytes`` are free.

    MemoryLimitReached where a memory limit does not allow so many new pages to each of
    ``processes``, which are about to make their slots on this host.
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


def make_slot(number: int, claim: Claim, size_bytes: int, mapper: Mapper | None = None) -> Slot:
    """Reserve and map a new slot. RamdiskFull, LocalTierError; no file is left on failure.

    The time is proportional to the size.
    """
    size_bytes = whole_pages(size_bytes)
    check_room(claim, size_bytes)
    name = file_name(number)
    try:
        fd = files.open_regular(name, claim.dir_fd, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise files.local_error("make slot", name, error, dir_fd=claim.dir_fd) from error
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return Slot(number, claim, _map(fd, size_bytes, name), fd, mapper)
    except BaseException as error:
        files.remove(name, claim.dir_fd)
        if isinstance(error, OSError):
            raise files.local_error(
                "reserve", name, error, size_bytes, dir_fd=claim.dir_fd
            ) from error
        raise
    finally:
        os.close(fd)


def open_slot(
    number: int, claim: Claim, place: ProcessFiles, mapper: Mapper | None = None
) -> tuple[Slot | None, CorruptData | None]:
    """Open a slot of an earlier life, with its contents if they are complete.

    The second result is the damage that was found. A file that can be mapped is kept as a free
    slot. The CRCs of the bytes are not checked here.
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
        with files.closing(files.open_regular(name, claim.dir_fd, os.O_RDWR)) as fd:
            slot = _adopt_file(fd, number, claim, mapper)
    except (OSError, CorruptData, LocalTierError) as error:
        absent = isinstance(error, FileNotFoundError)
        if not absent or published is not None:
            problem = problem or CorruptData("open", name, f"the slot cannot be used: {error}")
    if published is not None and slot is not None:
        problem = why_too_short(number, published, slot.size_bytes)
        if problem is None:
            slot.published = published
    return slot, problem


def _adopt_file(fd: int, number: int, claim: Claim, mapper: Mapper | None) -> Slot:
    length = os.fstat(fd).st_size
    if length == 0:
        raise CorruptData("open", file_name(number), "it is empty")
    size_bytes = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    if length != size_bytes:
        os.ftruncate(fd, size_bytes)  # a cut inside a page may have left each byte of the shards
    if os.fstat(fd).st_blocks * 512 < size_bytes:
        # On a full ramdisk the first access to a hole would be a SIGBUS.
        os.posix_fallocate(fd, 0, size_bytes)
    slot = Slot(number, claim, _map(fd, size_bytes, file_name(number)), fd, mapper)
    slot.written = True
    return slot


def _unmapped(mapper: Mapper | None, mapping: Mapping) -> MappedMemory:
    address = mapping.view(0, 1, None).ctypes.data
    return MappedMemory(mapper, address, mapping.size_bytes)


def _map(fd: int, size_bytes: int, name: str) -> Mapping:
    try:
        return Mapping(fd, size_bytes, writable=True)
    except (OSError, ValueError) as error:
        raise LocalTierError(
            "map", name, str(error), hint="is there address space left?"
        ) from error
