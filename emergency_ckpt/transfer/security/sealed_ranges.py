"""Sealed pieces of a body of shards, between a socket and ranges of memory or of a file.

A piece of one range in mode "mac" goes straight between mapping and socket. All others pass through
a buffer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.transfer.security.sealing import TAG_BYTES, Buffer, Direction, buffer
from emergency_ckpt.transfer.source import FileTarget

Ranges = Sequence[tuple[int, int]]
"""(offset, nbytes) pairs, at most PIECE_BYTES in all."""


def send(
    sock: socket.socket, sending: Direction, source: Mapping, ranges: Ranges, timeout_s: float
) -> None:
    """Send the ranges as one piece. Errors as of ``_native.send_ranges``.

    A concurrent write to the source gives the receiver a wrong tag or a wrong CRC.
    """
    fd, nbytes = sock.fileno(), sum(length for _, length in ranges)
    if len(ranges) == 1 and not sending.encrypts:
        tag = sending.tag_of_piece(_bytes_of(source, *ranges[0]))
        _native.send_ranges(fd, source, ranges, timeout_s)
        sock.settimeout(timeout_s)
        sock.sendall(tag)
        return
    with ExitStack() as held:
        outgoing = held.enter_context(buffer())
        if len(ranges) == 1:
            plain = _bytes_of(source, *ranges[0])
        else:
            gathered = held.enter_context(buffer()) if sending.encrypts else outgoing
            plain = _gather(source, ranges, gathered)
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
    with ExitStack() as held:
        incoming = held.enter_context(buffer())
        sealed = incoming.view[: nbytes + TAG_BYTES]
        if len(ranges) == 1 and not receiving.encrypts and isinstance(into, Mapping):
            crcs = _native.receive_ranges(fd, into, ranges, timeout_s)
            _native.receive_ranges(fd, incoming.mapping, [(0, TAG_BYTES)], timeout_s)
            receiving.check_piece(_bytes_of(into, *ranges[0]), sealed[:TAG_BYTES])
            return crcs
        if not receiving.encrypts and isinstance(into, FileTarget):
            # With their CRCs on the way, while the bytes are in the cache.
            places = [*_in_a_row(ranges), (nbytes, TAG_BYTES)]
            crcs = _native.receive_ranges(fd, incoming.mapping, places, timeout_s)[:-1]
            receiving.check_piece(sealed[:nbytes], sealed[nbytes:])
            for (at, length), (offset, _) in zip(places, ranges, strict=False):
                _write(into, sealed[at : at + length], offset)
            return crcs
        _native.receive_ranges(fd, incoming.mapping, [(0, nbytes + TAG_BYTES)], timeout_s)
        opening = held.enter_context(buffer()) if receiving.encrypts else incoming
        opened = receiving.open_piece(sealed, opening.view)
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


def _in_a_row(ranges: Ranges) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of the ranges where one follows the other from 0 on."""
    ends = [0, *accumulate(length for _, length in ranges)]
    return [(at, length) for at, (_, length) in zip(ends, ranges, strict=False)]


def _scatter(opened: memoryview, into: Mapping | FileTarget, ranges: Ranges) -> list[int]:
    parts = [
        (opened[at : at + length], offset)
        for (at, length), (offset, _) in zip(_in_a_row(ranges), ranges, strict=True)
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
