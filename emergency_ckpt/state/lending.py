"""Memory on loan: mapped memory that may be written again once nobody reads its views any more."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping


class LentCount:
    """The number of live leases of some memory.

    A view may end in any thread, in a garbage collection while that thread holds a lock, and at
    interpreter exit. So its end only appends to a deque, which takes no lock, and ``alive``
    subtracts.
    """

    def __init__(self) -> None:
        self._lent = 0
        self._returned: deque[None] = deque()

    def lease(self, owner: object) -> Lease:
        """Return the owner of views, which keeps ``owner`` alive. The caller holds a lock."""
        self._lent += 1
        return Lease(self, owner, self._returned)

    def alive(self) -> int:
        """Return the number of live leases. The caller holds a lock."""
        while self._returned:
            self._returned.popleft()
            self._lent -= 1
        return self._lent


class Lease:
    """Keeps the count, and the owner of the memory, while a view is alive."""

    __slots__ = ("__weakref__", "_count", "_end", "_owner")

    def __init__(self, count: LentCount, owner: object, returned: deque[None]) -> None:
        self._count = count
        self._owner = owner
        self._end = weakref.finalize(self, returned.append, None)
        self._end.atexit = False

    def end(self) -> None:
        """Return the memory though views may be alive: nobody reads them. Idempotent; any thread.

        Views may be in reference cycles until the next garbage collection.
        """
        self._end()


class Loan:
    """Memory on loan until ``end``; else for as long as this object or a view of it is alive."""

    def __init__(self, mapping: Mapping, lease: Lease) -> None:
        self._mapping = mapping
        self._lease = lease

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy."""
        if nbytes == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        return self._mapping.view(offset, nbytes, self._lease)

    def end(self) -> None:
        """As ``Lease.end``."""
        self._lease.end()
