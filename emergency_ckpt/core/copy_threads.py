"""The number of threads that copy and check the bytes of a save. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

_FASTEST_LINK_GB_S = 60.0
"""More than a device's link moves today: PCIe 5 gives 55."""
_LEAST = 2
_CORES_OF_ONE = 4
"""Training, its data and other processes of the host have the other cores."""


def threads_for(cores: int, one_gb_s: Callable[[], float]) -> int:
    """Return a quarter of the cores, but 2 at least, and no more than the link can use.

    ``one_gb_s``: gives what one thread does; asked where that may matter.
    """
    threads = max(_LEAST, cores // _CORES_OF_ONE)
    if threads > _LEAST:
        threads = max(_LEAST, min(threads, math.ceil(_FASTEST_LINK_GB_S / one_gb_s())))
    return min(threads, cores)
