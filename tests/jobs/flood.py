"""A process that opens so many connections a second and never proves itself."""

from __future__ import annotations

import os
import socket
import sys
import time

PAYLOADS = {
    "silent": b"",
    "half a frame": (200).to_bytes(4, "big") + b'{"type":"hello"',
    "the largest frame": (1024).to_bytes(4, "big") + b'"' + b"\n" * 1023,
    "a frame over the bound": (1 << 32).to_bytes(5, "big")[1:] + bytes(60_000),
}
KEPT = 300  # a stranger is short of descriptors too


def hello() -> bytes:
    """A valid one, without an answer to the server's proof."""
    payload = b'{"type":"hello","share":"' + b"Q" * 42 + b'g="}'
    return len(payload).to_bytes(4, "big") + payload


def main(address: str, rate: float, seconds: float) -> None:
    """Open connections at the rate, of all kinds in turn; prints how many were opened."""
    host, _, port = address.rpartition(":")
    kept: list[socket.socket] = []
    begin_s, opened = time.monotonic(), 0
    payloads = [*PAYLOADS.values(), hello()]
    print("begun", flush=True)
    while (now_s := time.monotonic() - begin_s) < seconds:
        if opened >= now_s * rate:
            time.sleep(0.001)
            continue
        sock = socket.socket()
        sock.setblocking(False)
        kept.append(sock)
        try:
            sock.connect((host, int(port)))
        except BlockingIOError:
            pass
        except OSError:
            continue
        finally:
            opened += 1
        if len(kept) > KEPT:
            kept.pop(0).close()
        late = kept[-2] if len(kept) > 1 else sock  # connected by now
        try:
            late.send(payloads[opened % len(payloads)])
        except OSError:
            continue  # turned away already
    print(opened, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
