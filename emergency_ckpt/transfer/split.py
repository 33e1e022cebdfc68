"""The division of a fetch into requests, and of requests into pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from emergency_ckpt.core.limits import MAX_RANGES
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.transfer.wire import MIB

MIN_REQUEST_BYTES = 4 * MIB
MAX_REQUEST_BYTES = 64 * MIB
_REQUESTS_PER_STREAM = 4  # so that a fast stream can take over from a slow one


class Part(NamedTuple):
    """A range of one wanted shard: position in the list, first byte in the shard, length."""

    position: int
    start: int
    nbytes: int


def requests(wanted: Sequence[ShardTarget], streams: int) -> list[list[Part]]:
    """Divide the wanted shards into requests of about equal size and at most MAX_RANGES parts.

    Large shards are divided, small ones grouped; each byte is in exactly one part. Empty shards
    need no request.
    """
    total = sum(target.nbytes for target in wanted)
    share = -(-total // (streams * _REQUESTS_PER_STREAM))
    size = min(max(share, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)
    result: list[list[Part]] = []
    parts: list[Part] = []
    room = size
    for position, target in enumerate(wanted):
        start = 0
        while start < target.nbytes:
            count = min(target.nbytes - start, room)
            parts.append(Part(position, start, count))
            start += count
            room -= count
            if room == 0 or len(parts) == MAX_RANGES:
                result.append(parts)
                parts, room = [], size
    return [*result, parts] if parts else result


def pieces(
    ranges: Sequence[tuple[int, int]], piece_bytes: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Group (offset, nbytes) ranges into lists of at most ``piece_bytes`` in all, in order.

    Items are (index of the range, offset, nbytes). A range over the limit is cut; ranges of zero
    bytes are left out.
    """
    piece: list[tuple[int, int, int]] = []
    room = piece_bytes
    for index, (offset, nbytes) in enumerate(ranges):
        done = 0
        while done < nbytes:
            count = min(nbytes - done, room)
            piece.append((index, offset + done, count))
            done += count
            room -= count
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece
