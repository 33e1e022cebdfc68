"""Bytes and files with small damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def damaged(data: bytes) -> Iterator[bytes]:
    """With each single bit turned over, and with each end cut off."""
    for position in range(len(data)):
        for bit in range(8):
            yield data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
        yield data[:position]


def flip(path: Path, at: int | None = None) -> None:
    """Turn over a bit of the byte ``at`` of a file, of the one in the middle by default."""
    with path.open("r+b") as file:
        at = path.stat().st_size // 2 if at is None else at
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
