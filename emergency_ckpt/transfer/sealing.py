"""Seals for one direction of a connection: each frame and piece opens once, and in order.

The cipher is AES-256-GCM of the ``cryptography`` package, which releases the interpreter's lock.
``PROTOCOL.md`` says which bytes the tag covers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import AuthenticationFailed
from emergency_ckpt.transfer import wire

_KEY_BYTES = 32
IV_BYTES = 12
SEAL_KEY_BYTES = _KEY_BYTES + IV_BYTES
TAG_BYTES = 16
PIECE_BYTES = 4 * wire.MIB
"""Length of a piece. Large, because each piece takes the interpreter's lock a few times."""

_FRAME, _PIECE = 0, 1
_KEPT_BUFFERS = 8
_BUFFER_BYTES = PIECE_BYTES + mmap.PAGESIZE  # room for the tag
Ranges = Sequence[tuple[int, int]]
"""(offset, nbytes) pairs, at most PIECE_BYTES in all."""


class Buffer:
    """Memory for one piece and its tag, shared by the native engine and the cipher.

    Attributes:
      mapping: for the native engine.
      view: the same bytes, writable.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("emergency_ckpt", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, _BUFFER_BYTES)
            self.mapping = Mapping(descriptor, _BUFFER_BYTES, writable=True)
        finally:
            os.close(descriptor)
        # The engine's views are read-only, and Python's mmap would keep a descriptor.
        self._array = self.mapping.view(0, _BUFFER_BYTES, self.mapping)
        memory = (ctypes.c_ubyte * _BUFFER_BYTES).from_address(self._array.ctypes.data)
        self.view = memoryview(memory).cast("B")


_free: deque[Buffer] = deque(maxlen=_KEPT_BUFFERS)
os.register_at_fork(after_in_child=_free.clear)  # their memory is the parent's alone


@contextmanager
def buffer() -> Generator[Buffer]:
    """Lend a buffer to one caller at a time. OSError when there is no memory for one."""
    # No lock: a thread that is not in a forked child might hold it.
    try:
        taken = _free.pop()
    except IndexError:
        taken = Buffer()
    try:
        yield taken
    finally:
        _free.append(taken)  # a full deque drops its oldest


class Direction:
    """The key and the sequence number of one direction. Not thread-safe.

    AuthenticationFailed when a frame or piece does not open; the connection must then be closed.
    """

    def __init__(self, seal_key: bytes, *, peer: str) -> None:
        self._cipher = AESGCM(seal_key[:_KEY_BYTES])
        self._iv = int.from_bytes(seal_key[_KEY_BYTES:], "big")
        self._number = 0
        self._peer = peer

    def seal_frame(self, payload: bytes) -> bytes:
        """Return the sealed frame: length, ciphertext, tag."""
        header = len(payload).to_bytes(wire.LENGTH_BYTES, "big")
        return header + self._cipher.encrypt(self._next_nonce(_FRAME), payload, header)

    def open_frame(self, header: bytes, sealed: bytes) -> bytes:
        """Return the payload of a frame of length ``header``; ``sealed`` ends with the tag."""
        try:
            return self._cipher.decrypt(self._next_nonce(_FRAME), sealed, header)
        except InvalidTag:
            raise self._altered() from None

    def seal_piece(self, source: memoryview, sealed: memoryview) -> None:
        """Fill ``sealed``, which is TAG_BYTES longer than ``source``."""
        self._cipher.encrypt_into(self._next_nonce(_PIECE), source, None, sealed)

    def open_piece(self, sealed: memoryview, target: memoryview) -> memoryview:
        """Return the bytes of a piece, which begin ``target``."""
        opened = target[: len(sealed) - TAG_BYTES]
        try:
            self._cipher.decrypt_into(self._next_nonce(_PIECE), sealed, None, opened)
        except InvalidTag:
            raise self._altered() from None
        return opened

    def _altered(self) -> AuthenticationFailed:
        return AuthenticationFailed(
            "receive from",
            self._peer,
            "the received bytes were not sealed by the peer as the next part of this connection",
            hint="packets are changed, repeated or dropped, or the peer overwrote a slot it sent",
        )

    def _next_nonce(self, kind: int) -> bytes:
        number = self._number
        self._number += 1
        return (self._iv ^ (kind << 64 | number)).to_bytes(IV_BYTES, "big")


def send_sealed(
    fd: int, sending: Direction, source: Mapping, ranges: Ranges, timeout_s: float
) -> None:
    """Send the ranges as one piece, which has one seal. Errors as of ``_native.send_ranges``.

    A concurrent write to the source gives the receiver a wrong tag or a wrong CRC.
    """
    nbytes = sum(length for _, length in ranges)
    with buffer() as outgoing, buffer() as gathered:
        if len(ranges) == 1:
            plain = source.view(*ranges[0], source).data
        else:
            plain = _gather(source, ranges, gathered)
        sending.seal_piece(plain, outgoing.view[: nbytes + TAG_BYTES])
        _native.send_ranges(fd, outgoing.mapping, [(0, nbytes + TAG_BYTES)], timeout_s)


def receive_sealed(
    fd: int, receiving: Direction, into: Mapping, ranges: Ranges, timeout_s: float
) -> list[int]:
    """Receive one piece into the ranges and return the CRC32C of each.

    Errors as of ``_native.receive_ranges``; AuthenticationFailed when the piece is not the one
    that the peer sealed. The bytes of the ranges are then undefined.
    """
    nbytes = sum(length for _, length in ranges)
    with buffer() as incoming, buffer() as opening:
        _native.receive_ranges(fd, incoming.mapping, [(0, nbytes + TAG_BYTES)], timeout_s)
        opened = receiving.open_piece(incoming.view[: nbytes + TAG_BYTES], opening.view)
        return _scatter(opened, into, ranges)


def _gather(source: Mapping, ranges: Ranges, into: Buffer) -> memoryview:
    at, copies = 0, []
    for offset, length in ranges:
        copies.append((source.view(offset, length, source), at))
        at += length
    _native.copy_crc32c(into.mapping, copies, 1)
    return into.view[:at]


def _scatter(opened: memoryview, into: Mapping, ranges: Ranges) -> list[int]:
    starts = accumulate((length for _, length in ranges), initial=0)
    parts = [
        (opened[at : at + length], offset)
        for at, (offset, length) in zip(starts, ranges, strict=False)
    ]
    return _native.copy_crc32c(into, parts, 1)
