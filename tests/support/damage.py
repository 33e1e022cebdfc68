"""Bytes with every small damage."""

from __future__ import annotations

from collections.abc import Iterator


def damaged(data: bytes) -> Iterator[bytes]:
    """With each single bit turned over, and with each end cut off."""
    for position in range(len(data)):
        for bit in range(8):
            yield data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
        yield data[:position]
