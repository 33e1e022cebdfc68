"""Seals for what travels one way on a connection: each frame and piece once, and in order.

The cipher is AES-256-GCM of the ``cryptography`` package, which lets other threads run meanwhile.
``PROTOCOL.md`` says which bytes are covered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emergency_ckpt._native import Mapping
from emergency_ckpt.errors import AuthenticationFailed
from emergency_ckpt.transfer import wire

_KEY_BYTES = 32
IV_BYTES = 12
SEAL_KEY_BYTES = _KEY_BYTES + IV_BYTES
TAG_BYTES = 16
PIECE_BYTES = 4 * wire.MIB
"""A piece of a body: large, because each costs a few turns of the interpreter's lock."""

_FRAME, _PIECE = 0, 1
_KEPT_BUFFERS = 8
_BUFFER_BYTES = PIECE_BYTES + mmap.PAGESIZE  # room for the tag


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
_free_lock = threading.Lock()


@contextmanager
def buffer() -> Generator[Buffer]:
    """A buffer that nobody else uses meanwhile. OSError where there is no memory for one."""
    with _free_lock:
        taken = _free.pop() if _free else None
    if taken is None:
        taken = Buffer()
    try:
        yield taken
    finally:
        with _free_lock:
            _free.append(taken)  # where there are enough, the oldest goes


class Direction:
    """The key and the sequence number of one direction. For one thread at a time.

    What does not open raises AuthenticationFailed, and the connection is of no more use.
    """

    def __init__(self, seal_key: bytes, *, encrypts: bool, peer: str) -> None:
        self.encrypts = encrypts
        self._cipher = AESGCM(seal_key[:_KEY_BYTES])
        self._iv = int.from_bytes(seal_key[_KEY_BYTES:], "big")
        self._number = 0
        self._peer = peer

    def seal_frame(self, payload: bytes) -> bytes:
        """The frame as it travels: length, payload or its ciphertext, tag."""
        header = len(payload).to_bytes(wire.LENGTH_BYTES, "big")
        nonce = self._next_nonce(_FRAME)
        if self.encrypts:
            return header + self._cipher.encrypt(nonce, payload, header)
        clear = header + payload
        return clear + self._cipher.encrypt(nonce, b"", clear)

    def open_frame(self, header: bytes, sealed: bytes) -> bytes:
        """The payload of a frame whose length was ``header``; ``sealed`` ends with the tag."""
        nonce = self._next_nonce(_FRAME)
        if self.encrypts:
            return self._opened(nonce, sealed, header)
        payload, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        self._opened(nonce, tag, header + payload)
        return payload

    def seal_piece(self, source: memoryview, sealed: memoryview) -> None:
        """Fill ``sealed``, which is TAG_BYTES longer than ``source``.

        Without encryption ``sealed`` begins with the bytes of ``source`` already, and gets the tag.
        """
        if self.encrypts:
            self._cipher.encrypt_into(self._next_nonce(_PIECE), source, None, sealed)
        else:
            sealed[len(source) :] = self.tag_of_piece(source)

    def tag_of_piece(self, source: memoryview) -> bytes:
        """The tag of a piece that travels as it is."""
        return self._cipher.encrypt(self._next_nonce(_PIECE), b"", source)

    def open_piece(self, sealed: memoryview, target: memoryview) -> memoryview:
        """The bytes of a piece: in ``target`` where it was encrypted, else where they are."""
        nbytes = len(sealed) - TAG_BYTES
        if not self.encrypts:
            self.check_piece(sealed[:nbytes], sealed[nbytes:])
            return sealed[:nbytes]
        try:
            self._cipher.decrypt_into(self._next_nonce(_PIECE), sealed, None, target[:nbytes])
        except InvalidTag:
            raise self._altered() from None
        return target[:nbytes]

    def check_piece(self, received: memoryview, tag: memoryview) -> None:
        """Compare the tag of a piece that travelled as it is."""
        self._opened(self._next_nonce(_PIECE), tag, received)

    def _opened(self, nonce: bytes, data: bytes | memoryview, clear: bytes | memoryview) -> bytes:
        try:
            return self._cipher.decrypt(nonce, data, clear)
        except InvalidTag:
            raise self._altered() from None

    def _altered(self) -> AuthenticationFailed:
        return AuthenticationFailed(
            "receive from",
            self._peer,
            "what came was not sealed by the peer as the next part of this connection",
            hint="somebody changes, repeats or drops packets, or the peer overwrote what it sent",
        )

    def _next_nonce(self, kind: int) -> bytes:
        number = self._number
        self._number += 1
        return (self._iv ^ (kind << 64 | number)).to_bytes(IV_BYTES, "big")
