"""Contract of the native engine. It moves bytes and knows nothing of what they mean.

Every call that may take more than microseconds releases the GIL. Sizes and offsets are in bytes and
checked against the mapping: out of range is ValueError, closed is ValueError. No call retains
a buffer after it returns, except where said.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

@final
class Mapping:
    """A shared mapping of the first ``size_bytes`` of the open file ``fd``.

    The file must already be that long (its blocks reserved by the caller). The descriptor is not
    kept: the caller may close it, and a lock on it is not prolonged. OSError where mmap fails,
    ValueError where the file is shorter than ``size_bytes``. The mapping lives until ``close`` or,
    when views or running calls hold it, until the last of them is gone; the thread that ends it
    releases the GIL meanwhile.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    def close(self) -> None:
        """No new call or view may use the mapping. Idempotent."""
    def view(self, offset: int, nbytes: int, owner: object) -> npt.NDArray[np.uint8]:
        """Read-only uint8 array over the mapped bytes, without a copy.

        The array, and every view made from it, keeps ``owner`` and the mapping alive.
        """

def copy_crc32c(
    mapping: Mapping, copies: Sequence[tuple[Buffer | npt.NDArray[Any], int]], threads: int
) -> list[int]:
    """Copy each C-contiguous buffer to its offset with non-temporal stores; CRC32C of each.

    The CRC is computed in the same pass. Nobody may write a buffer meanwhile, and no two ranges,
    sources included, may overlap. Work is split over ``threads`` threads (1 to 256) in pieces, also
    inside one buffer. ValueError, with nothing written, for a read-only mapping, a range outside of
    it, or a buffer that is not contiguous.
    """

def copy_and_count(
    mapping: Mapping,
    copies: Sequence[tuple[Buffer | npt.NDArray[Any], int]],
    patterns: Sequence[tuple[int, int, int]],
    threads: int,
) -> tuple[list[int], list[int]]:
    """Copy as ``copy_crc32c``; return the CRC32Cs, and how many values of each buffer fit.

    ``patterns``: for each copy (width, mask, match): its values of ``width`` bytes, little-endian,
    from the start of the buffer on, count where ``value & mask == match``. Width 1, 2, 4 or 8; 0
    counts none. In the same pass; a buffer with such a value is read once more. ValueError also for
    another number of patterns or another width.
    """

def check_and_count(
    mapping: Mapping,
    ranges: Sequence[tuple[int, int]],
    patterns: Sequence[tuple[int, int, int]],
    threads: int,
) -> tuple[list[int], list[int]]:
    """CRC32C of each (offset, nbytes), and how many of its values fit, as ``copy_and_count``.

    In one pass over memory. Values are counted from the start of the range on.
    """

def crc32c_ranges(mapping: Mapping, ranges: Sequence[tuple[int, int]], threads: int) -> list[int]:
    """CRC32C of each (offset, nbytes) of the mapping."""

def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C of a buffer, continuing from ``value`` (as google_crc32c.extend)."""

def crc32c_combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC32C of A+B from those of A and B and the length of B."""

def prefault(
    mapping: Mapping, offset: int, nbytes: int, threads: int, *, written: bool = False
) -> None:
    """Make the pages of the range present and, on tmpfs, writable without changing their bytes.

    Safe while others read and write there. OSError where there is no memory for them. Half as fast
    as it can be unless ``written`` says whether most of the pages were written before, through any
    mapping or call.
    """

def send_ranges(
    fd: int, mapping: Mapping, ranges: Sequence[tuple[int, int]], timeout_s: float
) -> None:
    """Send each (offset, nbytes) to a connected stream socket, in order.

    Works on blocking and non-blocking sockets; resumes after EINTR and short counts.
    TimeoutError when all is not sent in ``timeout_s`` (0 to 1e6), ConnectionError when the peer is
    gone; then the connection is of no more use. Closing ``fd`` meanwhile does not end the call,
    shutting the socket down does.
    """

def receive_ranges(
    fd: int, mapping: Mapping, ranges: Sequence[tuple[int, int]], timeout_s: float
) -> list[int]:
    """Receive into each (offset, nbytes), in order; CRC32C of each, computed on the way.

    As ``send_ranges``; ConnectionError also when the peer closes before all has come.
    """

def implementation() -> str:
    """Which CRC32C runs here: ``"sse4.2"``, ``"armv8"`` or ``"portable"``."""
