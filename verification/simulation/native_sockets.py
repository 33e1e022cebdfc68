"""The native module's transfers over simulated sockets."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import network
import sim

from emergency_ckpt import _native as real_native


class NativeSockets:
    """The native module, with its socket calls over simulated sockets."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_native, name)

    @staticmethod
    def send_ranges(
        fd: int, mapping: Any, ranges: Sequence[tuple[int, int]], timeout_s: float
    ) -> None:
        sock = _socket(fd)
        sock.settimeout(timeout_s)
        for offset, nbytes in ranges:
            if nbytes:
                sock.sendall(mapping.view(offset, nbytes, None))

    @staticmethod
    def _receive(fd: int, nbytes: int, deadline_s: float) -> bytes:
        data = bytearray()
        sock = _socket(fd)
        while len(data) < nbytes:
            left_s = deadline_s - sim.scheduler.now_s
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
            got = sock.recv(nbytes - len(data))
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, "the peer closed")
            data += got
        return bytes(data)

    def receive_ranges(
        self, fd: int, mapping: Any, ranges: Sequence[tuple[int, int]], timeout_s: float
    ) -> list[int]:
        deadline_s = sim.scheduler.now_s + timeout_s
        crcs: list[int] = []
        for offset, nbytes in ranges:
            data = self._receive(fd, nbytes, deadline_s)
            crcs += real_native.copy_crc32c(mapping, [(data, offset)], 1)
        return crcs


def _socket(fd: int) -> network.Socket:
    sock = network.network.by_fd.get(fd)
    if sock is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return sock
