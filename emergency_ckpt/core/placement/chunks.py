"""The chunks in which an array is stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod

CHUNK_BYTES = 64 << 20
"""Bytes that a chunk should have at most, since a reader of a part of it reads all of it."""

_MOST_TIMES = 8
"""A division into more chunks than so many times the fewest would make them too small."""


def chunk_shape(
    part: Sequence[int], item_bytes: int, limit_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the shape of the chunks of an array whose parts have the shape ``part``.

    It divides ``part`` evenly along its first axes, so that the values of a chunk lie together in
    a part. It is ``part`` itself where that has no such divisor.
    """
    whole = tuple(max(1, size) for size in part)
    chunk = list(whole)
    for axis, size in enumerate(whole):
        row_bytes = prod(whole[axis + 1 :]) * item_bytes
        if row_bytes * size <= limit_bytes:
            break
        chunk[axis] = _largest_divisor(size, max(1, limit_bytes // row_bytes))
        if row_bytes <= limit_bytes:
            break
    fewest = -(-prod(whole) * item_bytes // limit_bytes)
    count = prod(whole) // prod(chunk)
    return tuple(chunk) if count <= _MOST_TIMES * fewest else whole


def _largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is not above ``most``."""
    if size <= most:
        return size
    small = [each for each in range(1, isqrt(size) + 1) if size % each == 0]
    return max(each for low in small for each in (low, size // low) if each <= most)
