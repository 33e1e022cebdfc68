"""Slots: preallocated files of a ramdisk that hold one step of one process each.

A slot's blocks are reserved before it is mapped, so that no write to it causes SIGBUS. A slot
counts while its manifest is published; the manifest is removed before a byte is changed. Background
work (``Prefaulter``) reserves slots, makes their pages, and maps them for the devices' DMA.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from absl import logging

from emergency_ckpt import _native, files
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import (
    CorruptData,
    DeadlineExceeded,
    LocalTierError,
    MappingRefused,
    MemoryLimitReached,
    RamdiskFull,
)
from emergency_ckpt.ram.host_memory import new_pages_fit
from emergency_ckpt.ram.locks import Claim
from emergency_ckpt.ram.manifest import Published
from emergency_ckpt.ram.process_files import ProcessFiles, file_name, manifest_name, why_too_short
from emergency_ckpt.state.mapped import MappedMemory, Mapper, Pins
from emergency_ckpt.types import SaveId

_MAP_TIMEOUT_S = 30.0
"""A mapper that needs longer for one piece does not work."""
_UNMAP_TIMEOUT_S = 30.0
_kept: list[npt.NDArray[np.uint8]] = []
"""Memory that a device did not let go of."""


class Slot:
    """One slot file, mapped. Its attributes change only under the lock of the tier that owns it.

    Attributes:
      published: the published contents, or None.
      writing: a ``SlotWriter`` is in use.
      readers: number of peers, verifications and restores that read the slot now.
      pins: one for each save to storage that writes from the slot.
      bad_shards: indices of shards that failed verification.
      whole: whether all processes have the save, as their vote or a restore found; None: unknown.
      written: the pages were written or cleared before this process opened the slot.
      mapped: the part of the memory that is mapped for the DMA of the devices.
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


_PIECE_BYTES = 64 << 20
_ENDED = object()


class SlotMemory(NamedTuple):
    """The memory of a slot. ``written``: its pages were written before this process opened it."""

    mapping: Mapping
    mapped: MappedMemory
    written: bool


class Prefaulter:
    """Runs requests in one thread, which it starts when there are any. Thread-safe.

    Args:
      reserve: reserves the slots; its argument is their size in bytes.
      memories: returns the memory of all slots, or of the newest only when its argument is True,
        in the order in which it is needed.
      on_refused: told once why memory cannot be mapped, and what to raise.
    """

    def __init__(
        self,
        name: str,
        reserve: Callable[[int], None],
        memories: Callable[[bool], Sequence[SlotMemory]],
        on_refused: Callable[[str], None],
        threads: int,
    ) -> None:
        self._name = name
        self._reserve = reserve
        self._memories = memories
        self._on_refused = on_refused
        self._threads = threads
        self._maps = True
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: list[tuple[int | None, bool]] = []  # requests not yet begun
        self._first: list[SlotMemory] = []

    def ask(self, reserve_bytes: int | None, *, newest_only: bool = False) -> None:
        """Touch all pages, or those of the newest slot, and map them. Does not block.

        With ``reserve_bytes`` after ``reserve(reserve_bytes)``. A request during another one is
        done next. A failure is logged.
        """
        with self._lock:
            self._asked.append((reserve_bytes, newest_only))
            try:
                self._start()
            except RuntimeError as error:  # the next thread that starts takes the request
                self._warn(error)

    def ask_first(self, memories: Iterable[SlotMemory]) -> None:
        """Touch and map this memory before any other: somebody may wait for it. Does not block.

        Where no thread can be started, the mapping is given up, and all goes on without it.
        """
        missing = [memory for memory in memories if memory.mapped.missing]
        with self._lock:
            if missing and self._maps and not self._is_ending:
                self._first = [*missing, *self._first]
                try:
                    self._start()
                except RuntimeError as error:  # the process may have no more threads
                    self._warn(error)
                    missing, self._first = self._first, []
                else:
                    return
        self._give_up(missing)

    def close(self, timeout_s: float) -> None:
        """End the thread. Blocks for at most ``timeout_s`` seconds."""
        self._closing.set()
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon thread inside native code aborts the process at interpreter exit.
            thread = threading.Thread(None, self._run, "eckpt-prefault")
            thread.start()
            self._thread = thread  # ``close`` cannot wait for one that was not started

    @property
    def _is_ending(self) -> bool:
        return self._closing.is_set() or not threading.main_thread().is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                asked, self._asked = self._asked, []
                if self._is_ending or not (asked or self._first):
                    memories, self._first, self._thread = self._first, [], None
                    break
            self._work(self._memories_of(asked) if asked else [])
        self._give_up(memories)

    def _memories_of(self, asked: Sequence[tuple[int | None, bool]]) -> Sequence[SlotMemory]:
        size_bytes = max((size for size, _ in asked if size is not None), default=None)
        try:
            if size_bytes is not None:
                self._reserve(size_bytes)
        except (OSError, LocalTierError) as error:
            self._warn(error)
            return []
        return self._memories(all(only for _, only in asked))

    def _work(self, memories: Sequence[SlotMemory]) -> None:
        """Work on this memory in small steps, between which other memory may go first."""
        waiting = {memory: self._steps(memory) for memory in memories}
        try:
            while not self._is_ending:
                with self._lock:
                    first, self._first = self._first, []
                ahead = {
                    memory: waiting.pop(memory, None) or self._steps(memory) for memory in first
                }
                waiting = {**ahead, **waiting}
                if not self._maps:
                    self._give_up(waiting)
                if not waiting:
                    return
                memory, steps = next(iter(waiting.items()))
                try:
                    if next(steps, _ENDED) is _ENDED:
                        del waiting[memory]
                except (OSError, ValueError, LocalTierError) as error:
                    # ValueError: the slot was removed meanwhile.
                    self._warn(error)
                    self._give_up([memory])
                    del waiting[memory]
        finally:
            self._give_up(waiting)

    def _steps(self, memory: SlotMemory) -> Generator[None]:
        mapping, mapped, written = memory
        missing = mapped.missing
        for begin, nbytes in missing or [(0, mapping.size_bytes)]:
            for offset in range(begin, begin + nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, begin + nbytes - offset)
                _native.prefault(mapping, offset, size, self._threads, written=written)
                yield
            if missing and self._maps:
                try:
                    mapped.map(begin, nbytes)
                except MappingRefused as error:
                    self._maps = False
                    self._on_refused(str(error))
                yield

    def _give_up(self, memories: Iterable[SlotMemory]) -> None:
        for memory in memories:
            memory.mapped.give_up()

    def _warn(self, error: Exception) -> None:
        logging.warning("prefault of %s: %s; saves and restores are slower", self._name, error)
