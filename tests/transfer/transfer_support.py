"""What the transfer tests share: one save, raw sockets that speak the protocol by hand."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from emergency_ckpt import _native
from emergency_ckpt.testing.memory_holdings import anonymous_mapping
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.holdings import ShardTarget
from emergency_ckpt.types import Contents, SaveId

RUN_ID = "run-a"
SECRET = b"5e" * 32
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
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def send_frame(sock: socket.socket, frame: dict[str, Any]) -> None:
    payload = json.dumps(frame).encode()
    sock.sendall(len(payload).to_bytes(4, "big") + payload)


def read_frame(sock: socket.socket) -> dict[str, Any]:
    length = int.from_bytes(read_exactly(sock, 4), "big")
    return json.loads(read_exactly(sock, length))


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        got = sock.recv(nbytes - len(data))
        if not got:
            raise ConnectionResetError(f"closed after {len(data)} of {nbytes} bytes")
        data += got
    return data


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


def mac_by_hand(
    role: str, client_nonce: bytes, server_nonce: bytes, run_id: str = RUN_ID, key: bytes = SECRET
) -> bytes:
    """The formula of PROTOCOL.md, written again."""
    fields = [
        b"emergency_ckpt transfer",
        b"1",
        role.encode(),
        run_id.encode(),
        client_nonce,
        server_nonce,
    ]
    message = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hmac.new(key, message, hashlib.sha256).digest()


def log_in(sock: socket.socket) -> None:
    """The client's side of the handshake, by hand."""
    nonce = os.urandom(32)
    hello = {"type": "hello", "protocol": 1, "client_nonce": b64encode(nonce).decode()}
    send_frame(sock, hello)
    proof = read_frame(sock)
    server_nonce = b64decode(proof["server_nonce"])
    assert b64decode(proof["mac"]) == mac_by_hand("server", nonce, server_nonce)
    mac = mac_by_hand("client", nonce, server_nonce)
    send_frame(sock, {"type": "client_proof", "mac": b64encode(mac).decode()})
    assert read_frame(sock) == {"type": "welcome"}


def admit(sock: socket.socket) -> None:
    """The server's side of the handshake, by hand."""
    nonce = b64decode(read_frame(sock)["client_nonce"])
    server_nonce = os.urandom(32)
    mac = mac_by_hand("server", nonce, server_nonce)
    frame = {"server_nonce": b64encode(server_nonce).decode(), "mac": b64encode(mac).decode()}
    send_frame(sock, {"type": "server_proof", **frame})
    proof = read_frame(sock)
    assert b64decode(proof["mac"]) == mac_by_hand("client", nonce, server_nonce)
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
