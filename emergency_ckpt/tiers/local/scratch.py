"""Memory outside of the ramdisk for fetched shards that a process uses but does not keep."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import LocalTierError


class Scratch:
    """An anonymous file: bytes are written to it, then read through views. Nothing is published.

    Its pages are made as they are written, which costs half of making and clearing them first.
    They belong to this process (not to the ramdisk) and go with the last view, or at ``close``
    when there is none. Not thread-safe, but for writers of the file.

    Raises:
      LocalTierError: the system gives no such file.
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
        """Read-only bytes, without a copy; they live as long as what is made of the array."""
        return self._mapping.view(offset, nbytes, None)

    def close(self) -> None:
        """No more bytes are written; views stay."""
        os.close(self.fd)


def _no_memory(size_bytes: int, error: OSError) -> LocalTierError:
    return LocalTierError("make", f"{size_bytes} bytes of memory", str(error))
