"""Host memory that devices read and write by DMA: what of it is mapped, and who uses it.

No JAX here: ``ram`` maps its slots with a ``Mapper`` that the start hands down from ``state.link``.

The owner of a slot calls ``want``, then ``map`` for each range of ``missing``, in a background
thread. Where a mapping is refused, what is mapped by then stays, and the rest of the memory works
by the fallback. Readers and writers hold ``transfer`` while a device may touch the memory. A
restore calls ``wait`` before it sends: unmapped memory moves at a twentieth of the link's rate. The
owner calls ``unmap`` before the file shrinks, goes or is handed on. ``Pins`` name the memory that
must not be written, for as long as somebody may read it.

All of it does nothing without a ``Mapper``, and in a forked child: the devices, and what they have
mapped, are the parent's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import DeadlineExceeded, LocalTierError

PIECE_BYTES = 256 << 20
"""Of one call that maps: it may hold the GIL, for about 0.04 s a GiB."""


class Mapper(Protocol):
    """Maps host memory for DMA to and from all devices of this process. Thread-safe."""

    def map(self, address: int, nbytes: int) -> None:
        """Map whole pages from ``address`` on, none of which may be mapped already.

        Blocks. MappingRefused, with what to raise, where the system or the device does not allow
        it; nothing is mapped then.
        """
        ...

    def unmap(self, address: int) -> None:
        """Unmap what one ``map`` mapped from ``address`` on; no transfer may use it. Blocks."""
        ...


def cut_into_pieces(
    nbytes: int, shards: Iterable[tuple[int, int]] = (), piece_bytes: int = PIECE_BYTES
) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of the ranges to map: whole pages that follow each other.

    ``shards``: (offset, nbytes) of what the memory will hold. JAX takes an array from mapped memory
    without a copy only where one range has all of it. So a range ends between shards, and a shard
    that is larger than ``piece_bytes`` is a range of its own; no other range is larger. Where
    shards share their pages for longer than that, a range ends where it cuts the smallest of them.
    """
    page = mmap.PAGESIZE
    end = -(-nbytes // page) * page
    most = max(piece_bytes // page * page, page)
    places = sorted(place for place in shards if place[1])
    starts = [offset for offset, _ in places]
    spans = [(offset // page * page, -(-(offset + n) // page) * page) for offset, n in places]
    large = deque(span for span in spans if span[1] - span[0] > most)

    def cut_bytes(at: int) -> int:
        """Return the bytes of the shard that a range which ends at ``at`` would cut."""
        index = bisect_right(starts, at) - 1
        offset, size = places[index] if index >= 0 else (at, 0)
        return size if offset < at < offset + size else 0

    def best_end(begin: int, stop: int) -> int:
        """Return the last page up to ``stop`` that cuts no shard, else that cuts the smallest."""
        first, last = bisect_right(starts, begin), bisect_right(starts, stop)
        near = spans[max(first - 1, 0) : last]
        ends = {stop, *(at for span in near for at in span if begin < at <= stop)}
        half = begin + most // 2  # ranges that cut a shard are not small, so there are few
        costs = {at: cut_bytes(at) for at in ends}
        return min(ends, key=lambda at: (costs[at] > 0 and at < half, costs[at], -at))

    pieces: list[tuple[int, int]] = []
    begin = 0
    while begin < end:
        while large and large[0][0] < begin:
            large.popleft()  # it shares its first page with a large shard before it
        if large and large[0][0] == begin:
            stop = min(large.popleft()[1], end)
        else:
            stop = large[0][0] if large else end
            if stop > begin + most:
                stop = best_end(begin, begin + most)
        pieces.append((begin, stop - begin))
        begin = stop
    return pieces


class MappedMemory:
    """One range of host memory, and what of it is mapped for DMA. Thread-safe.

    It keeps no memory alive: the owner does, until ``unmap`` has returned.
    """

    def __init__(self, mapper: Mapper | None, address: int, nbytes: int) -> None:
        """``address``: of the first byte, at a page."""
        self.address = address
        self.nbytes = nbytes
        self._mapper = mapper
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._pieces: list[tuple[int, int]] = []  # (offset, end), in order
        self._plan: list[tuple[int, int]] | None = None  # (offset, nbytes), in order
        self._missing: list[tuple[int, int]] = []
        self._transfers = 0
        self._is_ending = False

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of the ranges that are about to be mapped."""
        with self._changed:
            return list(self._missing)

    def want(self, shards: Iterable[tuple[int, int]] = (), piece_bytes: int = PIECE_BYTES) -> None:
        """Note that all of it is about to be mapped: ``missing`` names what is not, ``wait`` waits.

        ``shards``, ``piece_bytes``: as in ``cut_into_pieces``; those of the first call count.
        """
        with self._changed:
            if self._mapper is None or self._is_ending or self._is_foreign:
                return
            if self._plan is None:
                self._plan = cut_into_pieces(self.nbytes, shards, piece_bytes)
            mapped = {(offset, end - offset) for offset, end in self._pieces}
            self._missing = [piece for piece in self._plan if piece not in mapped]

    def give_up(self) -> None:
        """Note that no more of it is mapped: nobody waits for that any longer."""
        with self._changed:
            self._missing.clear()
            self._changed.notify_all()

    def wait(self, offset: int, nbytes: int, timeout_s: float) -> None:
        """Wait until nothing of this range is missing, and no longer than ``timeout_s`` seconds.

        If that was too short, the mapper does not work, and later calls do not wait either.
        """

        def is_settled() -> bool:
            stop = offset + nbytes
            return not any(at < stop and offset < at + size for at, size in self._missing)

        with self._changed:
            if not self._is_foreign and not self._changed.wait_for(is_settled, timeout_s):
                self.give_up()

    def map(self, offset: int, nbytes: int) -> None:
        """Map this range, once; nothing happens where it is mapped, or after ``unmap`` began.

        Blocks. MappingRefused as ``Mapper.map``; ValueError for a range that is not inside, or that
        is mapped in part. One thread at a time.
        """
        if self._mapper is None or not nbytes or self._is_foreign:
            return
        if offset < 0 or offset + nbytes > -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE:
            raise ValueError(f"{nbytes} bytes at {offset} are not in {self.nbytes}")
        with self._changed:
            if self._is_ending or (offset, offset + nbytes) in self._pieces:
                return
            if any(begin < offset + nbytes and offset < end for begin, end in self._pieces):
                raise ValueError(f"{nbytes} bytes at {offset} are mapped in part")
            self._transfers += 1  # ``unmap`` waits for this call too
        try:
            self._mapper.map(self.address + offset, nbytes)
            with self._changed:
                self._pieces = sorted([*self._pieces, (offset, offset + nbytes)])
                self._missing = [piece for piece in self._missing if piece != (offset, nbytes)]
        finally:
            self._end_transfer()

    def parts(self, offset: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Return this range cut where mapped pieces meet, or None where some of it is not mapped.

        A copy by the device must not cross from one piece into the next, and JAX takes an array
        from its place only where there is one part.
        """
        parts: list[tuple[int, int]] = []
        at, stop = offset, offset + nbytes
        with self._changed:
            for begin, end in self._pieces:
                if begin <= at < min(end, stop):
                    parts.append((at, min(end, stop) - at))
                    at = min(end, stop)
        return parts if at == stop else None

    @contextlib.contextmanager
    def transfer(self) -> Generator[bool]:
        """Hold the memory mapped while a device may touch it; gives whether it may begin.

        False after ``unmap`` began, and in a forked child.
        """
        with self._changed:
            may_begin = not self._is_ending and not self._is_foreign
            self._transfers += may_begin
        try:
            yield may_begin
        finally:
            if may_begin:
                self._end_transfer()

    def unmap(self, timeout_s: float) -> None:
        """Refuse new transfers, wait for those that run, and unmap all. Idempotent. Blocks.

        DeadlineExceeded where transfers have not ended in time: all stays mapped, and the memory
        must stay too; LocalTierError where the device refuses.
        """
        if self._mapper is None or self._is_foreign:
            return
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_ending = True
            self.give_up()
            if not self._changed.wait_for(
                lambda: self._transfers == 0, max(0.0, deadline_s - time.monotonic())
            ):
                raise DeadlineExceeded(
                    "unmap", f"{self.nbytes} bytes of host memory", "a device still uses them"
                )
            while self._pieces:
                try:
                    self._mapper.unmap(self.address + self._pieces[-1][0])
                except Exception as error:
                    raise LocalTierError(
                        "unmap", f"{self.nbytes} bytes of host memory", str(error)
                    ) from error
                self._pieces.pop()

    @property
    def _is_foreign(self) -> bool:
        return os.getpid() != self._process

    def _end_transfer(self) -> None:
        with self._changed:
            self._transfers -= 1
            self._changed.notify_all()


class Pins:
    """The pins of some memory that have not ended.

    A client of storage that was given up may still read. The last view of it may end in any thread,
    in a garbage collection while that thread holds a lock, and at interpreter exit. So the end of a
    pin only appends to a deque, which takes no lock, and ``count`` subtracts.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._ended: deque[None] = deque()

    def pin(self, mapping: Mapping) -> Pin:
        """Return a new pin of ``mapping``. The caller holds a lock."""
        self._begun += 1
        return Pin(mapping, self._ended)

    def count(self) -> int:
        """Return the number of pins that have not ended. The caller holds a lock."""
        while self._ended:
            self._ended.popleft()
            self._begun -= 1
        return self._begun


class Pin:
    """Keeps memory as it is until ``end``; else while this object or a view of it is alive."""

    def __init__(self, mapping: Mapping, ended: deque[None]) -> None:
        self._mapping = mapping
        self._reader = _Reader()
        self._end = weakref.finalize(self._reader, ended.append, None)
        self._end.atexit = False

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy."""
        return self._mapping.view(offset, nbytes, self._reader)

    def end(self) -> None:
        """Release the memory though views may be alive: nobody reads them. Idempotent; any thread.

        Views may be in reference cycles until the next garbage collection.
        """
        self._end()


class _Reader:
    """Owns the views of one pin."""

    __slots__ = ("__weakref__",)
