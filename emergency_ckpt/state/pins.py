"""Pins: mapped memory that must not be written, for as long as somebody may read it."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping


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
