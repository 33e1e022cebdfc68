"""The arrays of one step, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import intersect, relative, shape_of, volume, whole
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.types import Box, LeafSpec

Array = npt.NDArray[Any]
PIECE_BYTES = 256 << 20
"""Bytes of a leaf that are read at once, where its boxes are not larger."""


class StepSource(Protocol):
    """One step. All methods block.

    Attributes:
      name: for messages.
      leaves: every leaf, by path.
    """

    name: str

    @property
    def leaves(self) -> Mapping[str, LeafSpec]: ...

    def boxes(self, path: str) -> Sequence[Box]:
        """Return disjoint boxes that make up a leaf, and that are cheap to read one by one."""
        ...

    def read(self, path: str, box: Box) -> Array:
        """Return a new array of the elements of a box, in the leaf's dtype. CorruptData."""
        ...

    def close(self) -> None: ...


def read_leaf(source: StepSource, path: str) -> Array:
    """Return a whole leaf as one array in memory."""
    spec = source.leaves[path]
    array = np.empty(spec.global_shape, dtype_named(spec.dtype))
    full = whole(spec.global_shape)
    for box in source.boxes(path):
        array[index_of(box, full)] = source.read(path, box)
    return array


def leaf_bytes(spec: LeafSpec) -> int:
    """Return the bytes of a whole leaf."""
    return volume(whole(spec.global_shape)) * DTYPE_ITEM_BYTES.get(spec.dtype, 1)


def index_of(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the index of ``box`` in an array that is ``origin``."""
    return tuple(slice(start, stop) for start, stop in relative(box, origin))


def copy_common(into: Array, into_box: Box, array: Array, box: Box) -> None:
    """Copy the elements that both boxes have from ``array``, which is ``box``."""
    common = intersect(into_box, box)
    if common is not None:
        into[index_of(common, into_box)] = array[index_of(common, box)]


def split(box: Box, chunk: Sequence[int], item_bytes: int) -> Iterator[Box]:
    """Yield parts of a box of at most ``PIECE_BYTES``, each of whole chunks, or of one chunk."""
    pending = [box]
    while pending:
        each = pending.pop()
        shape = shape_of(each)
        axis = next((i for i, size in enumerate(shape) if size > max(chunk[i], 1)), None)
        if axis is None or volume(each) * item_bytes <= PIECE_BYTES:
            yield each
            continue
        start, stop = each[axis]
        chunks = -(-(stop - start) // chunk[axis])
        middle = start + chunks // 2 * chunk[axis]
        for span in ((middle, stop), (start, middle)):
            pending.append((*each[:axis], span, *each[axis + 1 :]))
