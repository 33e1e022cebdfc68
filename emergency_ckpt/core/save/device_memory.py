"""The device memory that the copies of a snapshot may take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_WHOLE_POOL = 0.99
"""Part of its limit that a pool has taken from the device where it was taken at the start."""


class Free(NamedTuple):
    """Bytes of one device that copies may take, and why no more."""

    nbytes: int
    reason: str


def free_for_copies(platform: str, stats: Mapping[str, int]) -> Free:
    """Return half of what is certain to stay free, by JAX's ``memory_stats`` of one device.

    A training step that finds no memory has lost its donated state, so all that is doubtful counts
    as taken. Free is the limit less the peaks of what was in use and what was reserved, both since
    the start, and no more than the largest free block. On a GPU only where the pool took its
    memory at the start: else others may have it.
    """
    limit_bytes = stats.get("bytes_limit", 0)
    if limit_bytes <= 0 or "peak_bytes_in_use" not in stats:
        return Free(0, f"{platform} devices do not say how much memory they have")
    if platform == "gpu":
        pool_bytes = stats.get("pool_bytes", 0)
        if pool_bytes < _WHOLE_POOL * limit_bytes:
            return Free(0, "the memory of the devices was not taken at the start")
        limit_bytes = min(limit_bytes, pool_bytes)
    elif platform != "tpu":
        return Free(0, f"nothing is known of the memory of {platform} devices")
    taken_bytes = max(stats["peak_bytes_in_use"], stats.get("bytes_in_use", 0))
    taken_bytes += max(stats.get("peak_bytes_reserved", 0), stats.get("bytes_reserved", 0))
    free_bytes = limit_bytes - taken_bytes
    largest_bytes = stats.get("largest_free_block_bytes", 0)
    if 0 < largest_bytes < free_bytes:
        return Free(largest_bytes // 2, "half of the largest free block")
    return Free(max(free_bytes, 0) // 2, "half of what has never been used")
