"""The bytes of stored chunks that lie in a box one after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.types import Box

_MOST_RUNS = 4096
"""Maximum number of runs of a box. One of more chunks is left to the storage format's library."""

_REMEMBERED = 1024
"""Thousands of leaves have few shapes."""


class ChunkRun(NamedTuple):
    """The first ``nbytes`` of a chunk, as they follow each other in a box.

    Attributes:
      chunk: index of the chunk in the array's grid of chunks.
    """

    chunk: tuple[int, ...]
    nbytes: int


def runs_of(box: Box, array: StoredArray) -> tuple[ChunkRun, ...] | None:
    """Return the runs that make up the bytes of ``box`` in C order.

    None when the box is not made of whole chunks, or when the bytes of its chunks alternate in it.
    """
    return _runs_of(box, array.shape, array.chunk_shape, array.item_bytes)


@lru_cache(_REMEMBERED)
def _runs_of(
    box: Box, shape: tuple[int, ...], chunk_shape: tuple[int, ...], item_bytes: int
) -> tuple[ChunkRun, ...] | None:
    if not box:
        return (ChunkRun((), item_bytes),)
    along = _axis_of_runs(chunk_shape)
    grids: list[range] = []
    for axis, ((start, stop), chunk) in enumerate(zip(box, chunk_shape, strict=True)):
        is_complete = start % chunk == 0 and (stop % chunk == 0 or stop == shape[axis])
        if not is_complete or (axis > along and stop - start != chunk):
            return None
        grids.append(range(start // chunk, -(-stop // chunk)))
    if prod(map(len, grids)) > _MOST_RUNS:
        return None
    row_bytes = prod(chunk_shape[along + 1 :]) * item_bytes
    step, end = chunk_shape[along], box[along][1]
    return tuple(
        ChunkRun(chunk, (min((chunk[along] + 1) * step, end) - chunk[along] * step) * row_bytes)
        for chunk in product(*grids)
    )


def _axis_of_runs(chunk_shape: Sequence[int]) -> int:
    """Return the first axis along which a chunk has several elements, else the last."""
    last = len(chunk_shape) - 1
    return next((axis for axis in range(last) if chunk_shape[axis] > 1), last)
