"""A stranger between client and server: passes on what it likes, as it likes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from transfer_support import connect, peer_that, read_exactly

Tamper = Callable[[str, bytes], Iterable[bytes]]
"""(name of a unit, its bytes) -> what is sent on instead."""

CLIENT_UNITS = ("hello", "client_proof", "request")
SERVER_UNITS = ("server_hello", "welcome", "reply")
TAG = 16


def pass_on(_: str, data: bytes) -> Sequence[bytes]:
    return [data]


def _units(
    sock: socket.socket, names: Sequence[str], pieces: Sequence[int]
) -> Iterator[tuple[str, bytes]]:
    """Frames with the names, the first as many as are clear; then pieces of the sizes; then all."""
    clear = 2 if names is CLIENT_UNITS else 1
    for index, name in enumerate(names):
        header = read_exactly(sock, 4)
        sealed = 0 if index < clear else TAG
        yield name, header + read_exactly(sock, int.from_bytes(header, "big") + sealed)
    for index, nbytes in enumerate(pieces):
        yield f"piece {index}", read_exactly(sock, nbytes)
    while data := sock.recv(65536):
        yield "rest", data


@contextmanager
def stranger_between(address: str, tamper: Tamper, *, pieces: Sequence[int] = ()) -> Iterator[str]:
    """Yields the address where the stranger stands. ``pieces`` follow the server's first reply."""

    def forward(
        source: socket.socket, target: socket.socket, names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        with suppress(OSError):
            for name, data in _units(source, names, sizes):
                for part in tamper(name, data):
                    target.sendall(part)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def behave(client: socket.socket) -> None:
        with connect(address) as server:
            back = threading.Thread(target=forward, args=(server, client, SERVER_UNITS, pieces))
            back.start()
            forward(client, server, CLIENT_UNITS, ())
            back.join()

    with peer_that(behave) as own:
        yield own
