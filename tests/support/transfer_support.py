"""What the transfer tests share: one save, raw sockets that speak the protocol by hand."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emergency_ckpt import _native
from emergency_ckpt.testing.memory_holdings import anonymous_mapping
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.types import Contents, SaveId

RUN_ID = "run-a"
SECRET = b"5e" * 32
PIECE = 4 << 20
SAVE = SaveId(step=40, incarnation="0198a1b2c3d4-beef", run_id=RUN_ID)


def random_shards(*sizes: int) -> list[bytes]:
    return [os.urandom(size) for size in sizes]


def targets_of(contents: Contents) -> list[ShardTarget]:
    """Every shard, to the offset it has at the source."""
    return [
        ShardTarget(index, entry.nbytes, entry.offset)
        for index, entry in enumerate(contents.shards)
    ]


def fetch_all(
    client: TransferClient, address: str, digest: str, deadline_s: float = 60
) -> tuple[list[bytes], list[int], Contents]:
    """The bytes of every shard as they lie in the target, the CRCs told, and the contents."""
    contents = client.fetch_contents(address, digest)
    targets = targets_of(contents)
    into = anonymous_mapping(max((t.offset + t.nbytes for t in targets), default=0))
    crcs = client.fetch_shards(address, digest, targets, into, deadline_s)
    data = [into.view(t.offset, t.nbytes, into).tobytes() for t in targets]
    assert crcs == [_native.crc32c(part) for part in data]
    return data, crcs, contents


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition("@")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


class HandSeals:
    """The seals of PROTOCOL.md, written again. ``security`` as negotiated."""

    def __init__(self, sending: bytes, receiving: bytes, security: str) -> None:
        self._keys = {"send": sending, "receive": receiving}
        self._numbers = {"send": 0, "receive": 0}
        self.security = security

    def _cipher(self, way: str, kind: int) -> tuple[AESGCM, bytes]:
        key, iv = self._keys[way][:32], int.from_bytes(self._keys[way][32:], "big")
        nonce = iv ^ (kind * 2**64 + self._numbers[way])
        self._numbers[way] += 1
        return AESGCM(key), nonce.to_bytes(12, "big")

    def frame(self, payload: bytes) -> bytes:
        cipher, nonce = self._cipher("send", 0)
        length = len(payload).to_bytes(4, "big")
        if self.security == "aead":
            return length + cipher.encrypt(nonce, payload, length)
        return length + payload + cipher.encrypt(nonce, b"", length + payload)

    def opened_frame(self, length: bytes, sealed: bytes) -> bytes:
        cipher, nonce = self._cipher("receive", 0)
        if self.security == "aead":
            return cipher.decrypt(nonce, sealed, length)
        cipher.decrypt(nonce, sealed[-16:], length + sealed[:-16])
        return sealed[:-16]

    def piece(self, data: bytes) -> bytes:
        cipher, nonce = self._cipher("send", 1)
        if self.security == "aead":
            return cipher.encrypt(nonce, data, None)
        return data + cipher.encrypt(nonce, b"", data)

    def opened_piece(self, sealed: bytes) -> bytes:
        cipher, nonce = self._cipher("receive", 1)
        if self.security == "aead":
            return cipher.decrypt(nonce, sealed, None)
        cipher.decrypt(nonce, sealed[-16:], sealed[:-16])
        return sealed[:-16]


_seals: weakref.WeakKeyDictionary[socket.socket, HandSeals] = weakref.WeakKeyDictionary()


def send_frame(sock: socket.socket, frame: dict[str, Any]) -> None:
    """As the protocol has it: sealed, once ``log_in`` or ``admit`` is done."""
    payload = json.dumps(frame).encode()
    seals = _seals.get(sock)
    if seals is None:
        sock.sendall(len(payload).to_bytes(4, "big") + payload)
    else:
        sock.sendall(seals.frame(payload))


def read_frame(sock: socket.socket) -> dict[str, Any]:
    header = read_exactly(sock, 4)
    length, seals = int.from_bytes(header, "big"), _seals.get(sock)
    if seals is None:
        return json.loads(read_exactly(sock, length))
    return json.loads(seals.opened_frame(header, read_exactly(sock, length + 16)))


def send_body(sock: socket.socket, data: bytes) -> None:
    for start in range(0, len(data), PIECE):
        sock.sendall(_seals[sock].piece(data[start : start + PIECE]))


def read_body(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = min(PIECE, nbytes - len(data))
        data += _seals[sock].opened_piece(read_exactly(sock, piece + 16))
    return data


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        got = sock.recv(nbytes - len(data))
        if not got:
            raise ConnectionResetError(f"closed after {len(data)} of {nbytes} bytes")
        data += got
    return bytes(data)


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            got = sock.recv(65536)
        except ConnectionResetError:
            return data
        if not got:
            return data
        data += got


class HandKeys(NamedTuple):
    """The 152 bytes of PROTOCOL.md."""

    server_mac: bytes
    client_mac: bytes
    from_client: bytes
    from_server: bytes


def keys_by_hand(
    client_nonce: bytes,
    server_nonce: bytes,
    *,
    run_id: str = RUN_ID,
    key: bytes = SECRET,
    security: str = "mac",
    holder: str = "",
) -> HandKeys:
    """The formula of PROTOCOL.md, written again: RFC 5869 by hand."""
    fields = [
        b"emergency_ckpt transfer",
        b"2",
        security.encode(),
        run_id.encode(),
        holder.encode(),
    ]
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    extracted = hmac.new(client_nonce + server_nonce, key, hashlib.sha256).digest()
    block, part = b"", b""
    for number in range(1, 6):
        part = hmac.new(extracted, part + info + bytes([number]), hashlib.sha256).digest()
        block += part
    return HandKeys(block[:32], block[32:64], block[64:108], block[108:152])


def hello(nonce: bytes, protocol: int = 2, **fields: str) -> dict[str, Any]:
    return {
        "type": "hello",
        "protocol": protocol,
        "security": "mac",
        "holder": "",
        "client_nonce": b64encode(nonce).decode(),
        **fields,
    }


def log_in(sock: socket.socket, security: str = "mac", holder: str = "") -> None:
    """The client's side of the handshake, by hand."""
    nonce = os.urandom(32)
    send_frame(sock, hello(nonce, security=security, holder=holder))
    proof = read_frame(sock)
    server_nonce = b64decode(proof["server_nonce"])
    keys = keys_by_hand(nonce, server_nonce, security=security, holder=holder)
    assert b64decode(proof["mac"]) == keys.server_mac
    send_frame(sock, {"type": "client_proof", "mac": b64encode(keys.client_mac).decode()})
    _seals[sock] = HandSeals(keys.from_client, keys.from_server, security)
    assert read_frame(sock) == {"type": "welcome"}


def admit(sock: socket.socket) -> None:
    """The server's side of the handshake, by hand."""
    said = read_frame(sock)
    nonce, server_nonce = b64decode(said["client_nonce"]), os.urandom(32)
    keys = keys_by_hand(nonce, server_nonce, security=said["security"], holder=said["holder"])
    mac = b64encode(keys.server_mac).decode()
    frame = {"server_nonce": b64encode(server_nonce).decode(), "mac": mac}
    send_frame(sock, {"type": "server_proof", **frame})
    proof = read_frame(sock)
    assert b64decode(proof["mac"]) == keys.client_mac
    _seals[sock] = HandSeals(keys.from_server, keys.from_client, said["security"])
    send_frame(sock, {"type": "welcome"})


@contextmanager
def peer_that(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does ``behave`` with every connection, then closes it. Yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def run(sock: socket.socket) -> None:
        with sock:
            try:
                behave(sock)
            except OSError:
                return  # the client has seen enough

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            open_sockets.append(sock)
            threads.append(threading.Thread(target=run, args=(sock,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(10)
        listener.close()
        for sock in open_sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in threads:
            thread.join(10)
