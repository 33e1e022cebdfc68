"""Sealed pieces of a body of shards, between a socket and ranges of memory or of a file.

All ranges of a piece, which may be many small shards, have one seal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.transfer.security.sealing import TAG_BYTES, Buffer, Direction, buffer
from emergency_ckpt.transfer.source import FileTarget

Ranges = Sequence[tuple[int, int]]
"""(offset, nbytes) pairs, at most PIECE_BYTES in all."""


def send(fd: int, sending: Direction, source: Mapping, ranges: Ranges, timeout_s: float) -> None:
    """Send the ranges as one piece. Errors as of ``_native.send_ranges``.

    A concurrent write to the source gives the receiver a wrong tag or a wrong CRC.
    """
    nbytes = sum(length for _, length in ranges)
    with buffer() as outgoing, buffer() as gathered:
        plain = (
            _bytes_of(source, *ranges[0]) if len(ranges) == 1 else _gather(source, ranges, gathered)
        )
        sending.seal_piece(plain, outgoing.view[: nbytes + TAG_BYTES])
        _native.send_ranges(fd, outgoing.mapping, [(0, nbytes + TAG_BYTES)], timeout_s)


def receive(
    fd: int, receiving: Direction, into: Mapping | FileTarget, ranges: Ranges, timeout_s: float
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


def _bytes_of(mapping: Mapping, offset: int, nbytes: int) -> memoryview:
    return mapping.view(offset, nbytes, mapping).data


def _gather(source: Mapping, ranges: Ranges, into: Buffer) -> memoryview:
    at, copies = 0, []
    for offset, length in ranges:
        copies.append((source.view(offset, length, source), at))
        at += length
    _native.copy_crc32c(into.mapping, copies, 1)
    return into.view[:at]


def _scatter(opened: memoryview, into: Mapping | FileTarget, ranges: Ranges) -> list[int]:
    starts = accumulate((length for _, length in ranges), initial=0)
    parts = [
        (opened[at : at + length], offset)
        for at, (offset, length) in zip(starts, ranges, strict=False)
    ]
    if isinstance(into, Mapping):
        return _native.copy_crc32c(into, parts, 1)
    crcs = [_native.crc32c(part) for part, _ in parts]
    for part, offset in parts:
        _write(into, part, offset)
    return crcs


def _write(into: FileTarget, part: memoryview, offset: int) -> None:
    while part:
        written = os.pwrite(into.fd, part, offset)
        part, offset = part[written:], offset + written
