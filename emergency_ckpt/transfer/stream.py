"""One connected socket: frames and bodies with deadlines, ranges through seals.

Each piece of PIECE_BYTES must move within one io timeout; a slower peer counts as stalled.

The network causes TimeoutError and ConnectionError (OSError), a peer that breaks the protocol
ProtocolViolation, and bytes that the peer did not seal AuthenticationFailed. ``pool`` turns an
OSError into a TransferError that names the operation.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import MAX_FRAME_BYTES
from emergency_ckpt.errors import ProtocolViolation
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.json_decoders import Decoder
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.sealing import (
    PIECE_BYTES,
    TAG_BYTES,
    Direction,
    receive_sealed,
    send_sealed,
)

T = TypeVar("T")
Timeout = Callable[[], float]
"""Returns the seconds that the next piece may take; TimeoutError when none are left."""


def constant_timeout(timeout_s: float) -> Timeout:
    """Return ``timeout_s`` for every piece: a bound on each stall, not on the whole."""
    return lambda: timeout_s


def timeout_until(deadline_s: float, io_timeout_s: float, what: str) -> Timeout:
    """Return at most ``io_timeout_s`` per piece, and no time after the monotonic ``deadline_s``."""

    def remaining() -> float:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the deadline of the {what} has passed")
        return min(left_s, io_timeout_s)

    return remaining


def pieces(
    ranges: Sequence[tuple[int, int]], piece_bytes: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Group (offset, nbytes) ranges into lists of at most ``piece_bytes`` in all, in order.

    Items are (index of the range, offset, nbytes). A range over the limit is cut; ranges of zero
    bytes are left out.
    """
    piece: list[tuple[int, int, int]] = []
    room = piece_bytes
    for index, (offset, nbytes) in enumerate(ranges):
        done = 0
        while done < nbytes:
            count = min(nbytes - done, room)
            piece.append((index, offset + done, count))
            done += count
            room -= count
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece


class Stream:
    """A connected stream socket, owned by one thread; any thread may call ``abort``."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self.peer = peer
        self.received_bytes = 0  # of frames and bodies; 0 on a stale connection
        self._sending: Direction | None = None
        self._receiving: Direction | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        drop_in_child(sock, socket.socket.close)

    def seal(self, sending: Direction, receiving: Direction) -> None:
        """Seal both directions from now on."""
        self._sending, self._receiving = sending, receiving

    def send_frame(self, frame: msgspec.Struct, timeout_s: float) -> None:
        """Send all of the frame within ``timeout_s``."""
        if self._sending is None:
            data = wire.encode_frame(frame)
        else:
            data = self._sending.seal_frame(wire.encode_payload(frame))
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)

    def receive_frame(self, decoder: Decoder[T], timeout_s: float) -> T:
        """Receive one whole frame within ``timeout_s``."""
        payload = self.receive_payload(timeout_s)
        return wire.decode_json(decoder, payload, self.peer)

    def receive_payload(self, timeout_s: float, *, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """Receive one whole frame within ``timeout_s``; return its JSON, not decoded."""
        deadline_s = time.monotonic() + timeout_s
        header = self._receive_exactly(wire.LENGTH_BYTES, deadline_s)
        length = int.from_bytes(header, "big")
        if length > limit_bytes:
            raise ProtocolViolation(
                "read frame",
                self.peer,
                "the frame is too long, or the peer speaks another protocol",
                expected=f"at most {limit_bytes} bytes",
                actual=length,
            )
        if self._receiving is None:
            return bytes(self._receive_exactly(length, deadline_s))
        sealed = bytes(self._receive_exactly(length + TAG_BYTES, deadline_s))
        return self._receiving.open_frame(bytes(header), sealed)

    def send_body(self, data: bytes, timeout: Timeout) -> None:
        """Send ``data`` piece by piece, each within ``timeout()``. Only once sealed."""
        assert self._sending is not None
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            sealed = bytearray(len(piece) + TAG_BYTES)
            self._sending.seal_piece(memoryview(piece), memoryview(sealed))
            self._socket.settimeout(timeout())
            self._socket.sendall(sealed)

    def receive_body(self, nbytes: int, timeout: Timeout) -> bytes:
        """Receive ``nbytes``; memory grows with the bytes that arrive, not with ``nbytes``.

        Only once sealed.
        """
        assert self._receiving is not None
        body = bytearray()
        while len(body) < nbytes:
            count = min(PIECE_BYTES, nbytes - len(body))
            sealed = self._receive_exactly(count + TAG_BYTES, time.monotonic() + timeout())
            body += self._receiving.open_piece(memoryview(sealed), memoryview(bytearray(count)))
        return bytes(body)

    def send_ranges(
        self,
        mapping: Mapping,
        ranges: Sequence[tuple[int, int]],
        timeout: Timeout,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Send each (offset, nbytes) of the mapping, in order. Only once sealed."""
        assert self._sending is not None
        for piece in pieces(ranges, PIECE_BYTES):
            batch = [(offset, nbytes) for _, offset, nbytes in piece]
            send_sealed(self._socket.fileno(), self._sending, mapping, batch, timeout())
            on_bytes(sum(nbytes for _, nbytes in batch))

    def receive_ranges(
        self,
        into: Mapping,
        ranges: Sequence[tuple[int, int]],
        timeout: Timeout,
        on_bytes: Callable[[int], None],
    ) -> list[int]:
        """Receive into each (offset, nbytes), in order; return the CRC32C of each range.

        Only once sealed.
        """
        assert self._receiving is not None
        crcs = [0] * len(ranges)
        for piece in pieces(ranges, PIECE_BYTES):
            batch = [(offset, nbytes) for _, offset, nbytes in piece]
            parts = receive_sealed(self._socket.fileno(), self._receiving, into, batch, timeout())
            for (index, _, nbytes), crc in zip(piece, parts, strict=True):
                crcs[index] = _native.crc32c_combine(crcs[index], crc, nbytes)
            on_bytes(sum(nbytes for _, nbytes in batch))
        return crcs

    def looks_alive(self) -> bool:
        """Return False when the peer has closed or has sent unrequested bytes. Never blocks."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def linger(self, limit_bytes: int, timeout_s: float) -> None:
        """Read and drop incoming bytes, because to close with unread bytes loses our last frame."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while limit_bytes > 0:
                self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
                got = len(self._socket.recv(min(limit_bytes, MAX_FRAME_BYTES)))
                if got == 0:
                    return
                limit_bytes -= got
        except OSError:
            return  # the peer is gone or too slow: it only loses the explanation

    def abort(self) -> None:
        """Make every blocked and later call fail at once. The descriptor stays open."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # no longer connected, as intended

    def close(self) -> None:
        """Close the socket. Idempotent; only the thread that uses the stream may call it."""
        self._socket.close()

    def _receive_exactly(self, nbytes: int, deadline_s: float) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        done = 0
        while done < nbytes:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{done} of {nbytes} bytes arrived in time")
            self._socket.settimeout(left_s)
            got = self._socket.recv_into(view[done:])
            if got == 0:
                raise ConnectionResetError(f"the peer closed after {done} of {nbytes} bytes")
            done += got
            self.received_bytes += got
        return data
