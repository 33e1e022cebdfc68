"""Memory outside the ramdisk for fetched shards that a process uses but does not keep."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError


class Scratch:
    """An anonymous file: bytes are written to it, then read through views. Nothing is published.

    Its pages are allocated by the writes, which takes half the time of clearing them first. They
    are freed with the last view, or at ``close`` without views. Thread-safe for writes to the file
    only.

    Raises:
      LocalTierError: the system cannot make such a file.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(1, size_bytes)
        try:
            self.fd = os.memfd_create("eckpt-fetched", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(size_bytes, error) from error
        try:
            os.ftruncate(self.fd, self.size_bytes)
            self._mapping = Mapping(self.fd, self.size_bytes, writable=False)
        except OSError as error:
            self.close()
            raise _no_memory(size_bytes, error) from error

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a read-only uint8 array [nbytes] without a copy; it keeps the memory alive."""
        return self._mapping.view(offset, nbytes, None)

    def close(self) -> None:
        """Close the file for writes; views stay valid."""
        os.close(self.fd)


def _no_memory(size_bytes: int, error: OSError) -> LocalTierError:
    return LocalTierError("make", f"{size_bytes} bytes of memory", str(error))
