"""Bytes on the TCP sockets of this process, whoever opened them: Python, Gloo, gRPC or TensorStore.

The kernel counts them for each socket (``TCP_INFO`` of linux/tcp.h, ``tcpi_bytes_acked`` and
``tcpi_bytes_received``, since Linux 4.2): payload, without headers and repetitions. A socket that
is closed takes its count along, so they are read again and again; what a connection carried after
it was last looked at, before it was closed, is not seen.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

Ends = tuple[int, int]
"""Ports of a connection on loopback: this process's, and the other's."""
Counts = tuple[int, int]
"""Bytes sent and acknowledged, bytes received."""

_BYTES_ACKED_AT = 120
_INFO_BYTES = 256
_PAUSE_S = 0.001


def count_now() -> dict[Ends, Counts]:
    """Counts of each connected TCP socket since it was opened."""
    return dict(_sockets())


def _sockets() -> Iterator[tuple[Ends, Counts]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            link = Path(f"/proc/self/fd/{name}").readlink().name
            if not link.startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            with contextlib.suppress(OSError):  # not connected
                ends = copy.getsockname()[1], copy.getpeername()[1]
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                yield ends, struct.unpack_from("=QQ", info, _BYTES_ACKED_AT)


class SocketBytes:
    """Counts what goes over this process's sockets within the block."""

    def __init__(self) -> None:
        self._before: dict[Ends, Counts] = {}
        self._last: dict[Ends, Counts] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="socket-bytes", daemon=True)

    def __enter__(self) -> SocketBytes:
        self._before = count_now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._last.update(count_now())

    def _watch(self) -> None:
        while not self._done.wait(_PAUSE_S):
            self._last.update(count_now())

    def sums(self) -> list[tuple[Ends, Counts]]:
        """Ends, and bytes sent and received since the block began."""
        found: list[tuple[Ends, Counts]] = []
        for ends, (sent, received) in sorted(self._last.items()):
            sent_before, received_before = self._before.get(ends, (0, 0))
            found.append((ends, (sent - sent_before, received - received_before)))
        return found
