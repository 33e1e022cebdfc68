"""What the transfer tests share: one save, raw sockets that speak the protocol by hand."""

from __future__ import annotations

import functools
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

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from memory_holdings import anonymous_mapping

from emergency_ckpt import _native
from emergency_ckpt.cluster.peers import fetch_contents
from emergency_ckpt.transfer import ShardTarget, TransferClient
from emergency_ckpt.types import Contents, SaveId

RUN_ID = "run-a"
SECRET = b"9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
NO_HOLDER = "0" * 32
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
    contents = fetch_contents(client, address, digest)
    targets = targets_of(contents)
    into = anonymous_mapping(max((t.offset + t.nbytes for t in targets), default=0))
    crcs = client.fetch_shards(address, digest, targets, into, deadline_s)
    data = [into.view(t.offset, t.nbytes, into).tobytes() for t in targets]
    assert crcs == [_native.crc32c(part) for part in data]
    return data, crcs, contents


def quick_client(io_timeout_s: float = 60, streams: int = 1) -> TransferClient:
    return TransferClient(
        run_id=RUN_ID,
        secret=SECRET,
        connect_timeout_s=io_timeout_s,
        io_timeout_s=io_timeout_s,
        streams=streams,
    )


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition("@")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def fail_to_resolve(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let no name be resolved, for the reason ``number`` of ``socket.EAI_*``."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "as a test says")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


class HandSeals:
    """The seals of PROTOCOL.md, written again."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._keys = {"send": sending, "receive": receiving}
        self._numbers = {"send": 0, "receive": 0}

    def _cipher(self, way: str, kind: int) -> tuple[AESGCM, bytes]:
        key, iv = self._keys[way][:32], int.from_bytes(self._keys[way][32:], "big")
        nonce = iv ^ (kind * 2**64 + self._numbers[way])
        self._numbers[way] += 1
        return AESGCM(key), nonce.to_bytes(12, "big")

    def frame(self, payload: bytes) -> bytes:
        cipher, nonce = self._cipher("send", 0)
        length = len(payload).to_bytes(4, "big")
        return length + cipher.encrypt(nonce, payload, length)

    def opened_frame(self, length: bytes, sealed: bytes) -> bytes:
        cipher, nonce = self._cipher("receive", 0)
        return cipher.decrypt(nonce, sealed, length)

    def piece(self, data: bytes) -> bytes:
        cipher, nonce = self._cipher("send", 1)
        return cipher.encrypt(nonce, data, None)

    def opened_piece(self, sealed: bytes) -> bytes:
        cipher, nonce = self._cipher("receive", 1)
        return cipher.decrypt(nonce, sealed, None)


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
    """The 120 bytes of PROTOCOL.md."""

    client_mac: bytes
    from_client: bytes
    from_server: bytes


@functools.cache
def stretched_by_hand(run_id: str, key: bytes) -> bytes:
    scrypt = Scrypt(salt=b"emergency_ckpt " + run_id.encode(), length=32, n=2**14, r=8, p=1)
    return scrypt.derive(key)


def keys_by_hand(
    client_share: bytes,
    server_share: bytes,
    joint: bytes,
    *,
    run_id: str = RUN_ID,
    key: bytes = SECRET,
    holder: str = NO_HOLDER,
) -> HandKeys:
    """The formula of PROTOCOL.md, written again: RFC 5869 by hand."""
    fields = [
        b"emergency_ckpt transfer",
        b"3",
        run_id.encode(),
        holder.encode(),
    ]
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    salt = client_share + server_share
    extracted = hmac.new(salt, joint + stretched_by_hand(run_id, key), hashlib.sha256).digest()
    block, part = b"", b""
    for number in range(1, 5):
        part = hmac.new(extracted, part + info + bytes([number]), hashlib.sha256).digest()
        block += part
    return HandKeys(block[:32], block[32:76], block[76:120])


class Shares:
    """One side's part of the key exchange of PROTOCOL.md."""

    def __init__(self, private: bytes | None = None) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private or os.urandom(32))
        self.share = self._private.public_key().public_bytes_raw()

    def joint(self, other: bytes) -> bytes:
        return self._private.exchange(X25519PublicKey.from_public_bytes(other))


def hello(share: bytes) -> dict[str, Any]:
    return {"type": "hello", "share": b64encode(share).decode()}


def server_hello(share: bytes) -> dict[str, Any]:
    return {"type": "server_hello", "share": b64encode(share).decode(), "holder": NO_HOLDER}


def client_proof(mac: bytes) -> dict[str, Any]:
    return {"type": "client_proof", "mac": b64encode(mac).decode()}


def greet_by_hand(
    sock: socket.socket, mine: Shares, *, key: bytes = SECRET
) -> tuple[HandKeys, dict[str, Any]]:
    """Send a hello; return the keys by ``key``, and the server's answer."""
    send_frame(sock, hello(mine.share))
    answer = read_frame(sock)
    theirs = b64decode(answer["share"])
    joint, holder = mine.joint(theirs), answer["holder"]
    return keys_by_hand(mine.share, theirs, joint, key=key, holder=holder), answer


def log_in(sock: socket.socket) -> dict[str, Any]:
    """The client's side of the handshake, by hand; the server's hello."""
    keys, answer = greet_by_hand(sock, Shares())
    send_frame(sock, client_proof(keys.client_mac))
    _seals[sock] = HandSeals(keys.from_client, keys.from_server)
    assert read_frame(sock) == {"type": "welcome"}
    return answer


def admit(sock: socket.socket) -> None:
    """The server's side of the handshake, by hand."""
    theirs, mine = b64decode(read_frame(sock)["share"]), Shares()
    keys = keys_by_hand(theirs, mine.share, mine.joint(theirs))
    send_frame(sock, server_hello(mine.share))
    proof = read_frame(sock)
    assert b64decode(proof["mac"]) == keys.client_mac
    _seals[sock] = HandSeals(keys.from_server, keys.from_client)
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
