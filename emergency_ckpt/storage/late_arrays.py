"""The items of a step of another tier, whose arrays are loaded while they are written.

A state needs no second copy in memory then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
from etils import epath

from emergency_ckpt.core.boxes import volume, whole
from emergency_ckpt.core.placement.chunks import chunk_shape
from emergency_ckpt.core.restore.leaves import STORED_AS_UINT8
from emergency_ckpt.core.step_names import leaves_by_item
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import path_of
from emergency_ckpt.storage.item.state import JAX_ARRAY, NUMPY_ARRAY, ItemArray, StoredPart
from emergency_ckpt.storage.marker import ITEM
from emergency_ckpt.tier import StepReader, leaf_bytes, read_leaf

_CHUNKED_BYTES = 16 << 20  # smaller leaves are one chunk


def late_items(
    step: StepReader,
    like: Mapping[str, epath.Path | None],
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], bool]:
    """Return a step's state by Orbax's items, as ``StepWriter`` takes it; True when like ``like``.

    A step has the paths of leaves alone. The nodes of an item that has other leaves in ``like`` are
    dicts; so are all, in the item ``state``, where leaves are in none of ``like``. Items without
    leaves are left out, as Orbax does. An item without a folder has no structure but dicts.
    ``progress``: called with the bytes of each leaf that was read.
    """
    values = {path: _late_array(step, path, progress) for path in step.leaves}
    parts = leaves_by_item(like, values)
    if not like or sum(map(len, parts.values())) < len(values):
        return {ITEM: tree_of(values)}, False
    trees = {name: tree_like(item, parts[name]) for name, item in like.items()}
    unlike = {name: tree_of(parts[name]) for name, tree in trees.items() if tree is None}
    found = trees | unlike
    return {n: tree for n, tree in found.items() if not ocp.utils.is_empty_node(tree)}, not unlike


def _late_array(step: StepReader, path: str, progress: Callable[[int], None]) -> ItemArray | None:
    """Return an array that is read when it is written; None for a leaf without elements."""
    leaf = step.leaves[path]
    shape = leaf.global_shape
    if 0 in shape:
        return None
    dtype = np.dtype(np.uint8) if leaf.dtype in STORED_AS_UINT8 else dtype_named(leaf.dtype)

    def load() -> npt.NDArray[Any]:
        array = read_leaf(step, path)
        progress(array.nbytes)
        return array.view(dtype)

    part = shape
    boxes = step.boxes(path) if leaf_bytes(leaf) >= _CHUNKED_BYTES else ()
    if len(boxes) > 1:
        # A process that reads its own shard then reads little else.
        part = tuple(stop - start for start, stop in max(boxes, key=volume))
    return ItemArray(
        shape,
        dtype.name,
        NUMPY_ARRAY if leaf.key_impl is None else JAX_ARRAY,
        shape,
        chunk_shape(part, dtype.itemsize),
        None,
        leaf.key_impl,
        (StoredPart(whole(shape), leaf_bytes(leaf), load),),
    )


def tree_of(values: Mapping[str, Any]) -> Any:
    """Return nested dicts with ``values`` at their paths. InvalidState when two are in the way."""
    root: dict[str, Any] = {}
    if list(values) == [""]:
        return values[""]
    for path, value in sorted(values.items()):
        *outer, last = path.split("/")
        inner = root
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise _in_the_way(path)
        if last in inner:
            raise _in_the_way(path)
        inner[last] = value
    return root


def _in_the_way(path: str) -> InvalidState:
    return InvalidState(
        "write", f"leaf {path!r}", "a key with a slash makes its path that of another leaf's child"
    )


def tree_like(item: epath.Path | None, values: Mapping[str, Any]) -> Any | None:
    """Return ``values`` in the structure of the Orbax item, or None when its leaves are others.

    Leaves with None for a value are not among the item's, as arrays without elements.
    """
    if item is None:
        return None
    tree = ocp.StandardCheckpointHandler().metadata(item).tree
    found = {path_of(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    if found != {path for path, value in values.items() if value is not None}:
        return None

    def value_at(key_path: Any, described: Any) -> Any:
        del described
        return values[path_of(key_path)]

    return jax.tree_util.tree_map_with_path(value_at, tree)
