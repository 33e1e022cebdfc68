"""Host memory for the bytes of one save, reused from save to save."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Sequence

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.state.lending import LentCount, Loan
from emergency_ckpt.state.staging import Memory

_MOST_AREAS = 2
"""One that is used, and one that a write which was given up may still read."""


class Borrowed:
    """The area on loan to one save, which alone writes to it."""

    def __init__(self, mapping: Mapping, loan: Loan, threads: int) -> None:
        self._mapping = mapping
        self._threads = threads
        self.loan = loan

    def copy(self, copies: Sequence[tuple[Memory, int]]) -> list[int]:
        """Copy contiguous memory to its offset in bytes; return the CRC32C of each."""
        return _native.copy_crc32c(self._mapping, copies, self._threads)


class ScratchArea:
    """Memory of one process outside of its ramdisk. Thread-safe.

    It grows to the largest save, and stays: new pages cost ten times the copy. Pages that no save
    has written cost nothing. While a save that was given up is still read, the next one gets
    another area, and a third is refused, so that a storage that hangs cannot take all memory.
    """

    def __init__(self, threads: int) -> None:
        """``threads``: of each copy."""
        self._threads = threads
        self._lock = threading.Lock()
        self._current: tuple[Mapping, LentCount] | None = None
        self._given_up: list[LentCount] = []

    def borrow(self, nbytes: int) -> Borrowed:
        """Lend an area of at least ``nbytes``; it is free again at the end of the loan.

        Raises:
          SaveFailed: earlier saves still use all areas, or the system has no memory.
        """
        with self._lock:
            if self._areas_lent() >= _MOST_AREAS:
                gc.collect()  # views of failed saves may be in cycles
                if self._areas_lent() >= _MOST_AREAS:
                    raise SaveFailed(
                        "borrow",
                        f"{nbytes} bytes of memory",
                        "storage still reads the memory of earlier saves, which were given up",
                        hint="find out why storage does not answer",
                    )
            if self._current is not None:
                mapping, count = self._current
                if count.alive() > 0:
                    self._given_up.append(count)
                    self._current = None
                elif mapping.size_bytes < nbytes:
                    self._current = None
            if self._current is None:
                self._current = (_new_memory(nbytes), LentCount())
            mapping, count = self._current
            return Borrowed(mapping, Loan(mapping, count.lease(mapping)), self._threads)

    def release(self) -> None:
        """Return the memory to the system once no view of it is alive."""
        with self._lock:
            self._current = None

    def _areas_lent(self) -> int:
        self._given_up = [count for count in self._given_up if count.alive() > 0]
        current = self._current is not None and self._current[1].alive() > 0
        return len(self._given_up) + current


def _new_memory(nbytes: int) -> Mapping:
    size_bytes = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
    try:
        fd = os.memfd_create("eckpt-capture", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            return Mapping(fd, size_bytes, writable=True)
        finally:
            os.close(fd)
    except OSError as error:
        raise SaveFailed("make", f"{size_bytes} bytes of memory", str(error)) from error
