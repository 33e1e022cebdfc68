"""Host to device: a restored state from host bytes, without a copy where JAX allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.tiers.dtypes import dtype_named
from emergency_ckpt.tiers.state_tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    boxes_by_device,
)
from emergency_ckpt.types import ShardId

BytesOf = Callable[[ShardId], npt.NDArray[np.uint8]]


def materialize(tree: StateTree, like: PyTree, bytes_of: BytesOf) -> PyTree:
    """The state that ``tree`` describes, each shard's bytes taken from ``bytes_of``.

    ``bytes_of`` gives read-only uint8 arrays that must not change while the result lives: on CPU
    64-byte aligned memory becomes the array's own buffer. ``like`` gives the type of host leaves.
    Not collective. Blocks for the transfer to the devices.
    """
    flat = jax.tree_util.tree_leaves(like)
    blocks: list[npt.NDArray[Any]] = []
    devices: list[Device] = []
    per_leaf: list[tuple[Leaf, int]] = []
    values: dict[str, object] = {}
    for leaf in tree.leaves:
        if leaf.sharding is None:
            values[leaf.spec.path] = _host_value(leaf, flat[leaf.position], bytes_of)
            continue
        mine = {d: b for d, b in boxes_by_device(leaf).items() if _is_mine(d)}
        by_box = {
            box: _typed(leaf, ShardId(leaf.spec.path, box), bytes_of) for box in mine.values()
        }
        blocks.extend(by_box[box] for box in mine.values())
        devices.extend(mine)
        per_leaf.append((leaf, len(mine)))
    placed = jax.device_put(blocks, devices) if blocks else []
    values.update(_assemble(per_leaf, placed))
    return tree.unflatten(values)


def _is_mine(device: Device) -> bool:
    return device.process_index == jax.process_index()


def _assemble(per_leaf: list[tuple[Leaf, int]], placed: list[jax.Array]) -> Mapping[str, object]:
    values: dict[str, object] = {}
    start = 0
    for leaf, count in per_leaf:
        assert leaf.sharding is not None
        array = jax.make_array_from_single_device_arrays(
            leaf.spec.global_shape,
            leaf.sharding,
            placed[start : start + count],
            dtype=dtype_named(leaf.spec.dtype),
        )
        start += count
        if leaf.kind is LeafKind.KEYS:
            array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
        values[leaf.spec.path] = array
    return values


def _typed(leaf: Leaf, shard: ShardId, bytes_of: BytesOf) -> npt.NDArray[Any]:
    shape = tuple(stop - start for start, stop in shard.box)
    return bytes_of(shard).view(dtype_named(leaf.spec.dtype)).reshape(shape)


def empty_leaf(leaf: Leaf, like: object) -> object:
    """A zero-size leaf, on its devices: all there is to know of it is its spec."""
    tree = StateTree((Leaf(leaf.spec, leaf.kind, leaf.sharding, 0),), _ONE_LEAF)
    return materialize(tree, like, lambda _: np.empty(0, np.uint8))


_ONE_LEAF = jax.tree_util.tree_structure(0)


def _host_value(leaf: Leaf, like: object, bytes_of: BytesOf) -> object:
    shard = ShardId(leaf.spec.path, whole(leaf.spec.global_shape))
    value = _typed(leaf, shard, bytes_of).copy()
    if leaf.kind is LeafKind.SCALAR:
        kind: Any = type(like)
        return kind(value.item())
    return value[()] if isinstance(like, np.generic) else value
