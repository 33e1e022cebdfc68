"""A process of its own for one real client: calls in by msgpack on stdin, results out on stdout.

The clients read their environment when they are imported, so the process that runs pytest cannot
test them: any test before may have imported them already.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
from typing import IO, Any

import msgspec

_LENGTH = struct.Struct("<I")


def send(stream: IO[bytes], message: object) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other side is gone")
    (length,) = _LENGTH.unpack(head)
    return msgspec.msgpack.decode(stream.read(length))


def main(module_name: str) -> None:
    # Libraries may print; the real stdout is for results alone.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module = importlib.import_module(module_name)
    while True:
        try:
            function, arguments = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = {"value": getattr(module, function)(**arguments)}
        except Exception as error:  # noqa: BLE001 - raised again in the test's process
            reply = {"error": type(error).__name__, "text": str(error)}
        send(results, reply)


if __name__ == "__main__":
    main(sys.argv[1])
