"""Device to host: views of the shards that this process stores, taken in the training thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.errors import StateMismatch
from emergency_ckpt.tiers.dtypes import dtype_named
from emergency_ckpt.tiers.state_tree import (
    Leaf,
    LeafKind,
    StateTree,
    TreeDef,
    boxes_by_device,
    is_key_type,
)
from emergency_ckpt.types import ShardId


@dataclasses.dataclass(frozen=True, slots=True)
class _Take:
    """Where to find one shard: flat position of its leaf and index among addressable shards."""

    shard: ShardId
    leaf: Leaf
    addressable: int


class SnapshotRecipe:
    """How to take the shards ``wanted`` out of states like ``tree``, in that order.

    Built once for a structure of state; ``matches`` says cheaply whether it still applies.
    """

    def __init__(self, tree: StateTree, wanted: Sequence[ShardId]) -> None:
        self._tree = tree
        leaves = {leaf.spec.path: leaf for leaf in tree.leaves}
        self._takes: list[_Take] = []
        for shard in wanted:
            leaf = leaves[shard.leaf]
            self._takes.append(_Take(shard, leaf, _addressable_index(leaf, shard)))
        self._used = sorted({take.leaf.position for take in self._takes})

    def matches(self, flat: Sequence[Any], treedef: TreeDef) -> bool:
        """True when a flattened state has the structure this recipe was built for."""
        if treedef != self._tree.treedef:
            return False
        return all(_is_like(leaf, flat[leaf.position]) for leaf in self._tree.leaves)

    def take(self, flat: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Host views of the wanted shards. Blocks until the bytes are on the host, no longer.

        All transfers are started before the first is waited for. The views stay valid when the
        state is donated: on CPU they share the arrays' buffers, which then live on.
        """
        stored: dict[int, Any] = {}
        for position in self._used:
            value = flat[position]
            if isinstance(value, jax.Array):
                if is_key_type(value.dtype):
                    value = jax.random.key_data(value)
                if not _on_cpu(value):
                    value.copy_to_host_async()
            stored[position] = value
        return [self._view(take, stored[take.leaf.position]) for take in self._takes]

    @staticmethod
    def _view(take: _Take, value: Any) -> npt.NDArray[Any]:
        if isinstance(value, jax.Array):
            return np.asarray(value.addressable_data(take.addressable))
        # Host values may be changed in place by the next step: small, so copied.
        return np.array(value, dtype=dtype_named(take.leaf.spec.dtype))


def _is_like(leaf: Leaf, value: Any) -> bool:
    if leaf.kind is LeafKind.SCALAR:
        # A Python number may become one of another type from step to step.
        is_number = isinstance(value, bool | int | float)
        return is_number and np.asarray(value).dtype.name == leaf.spec.dtype
    if leaf.kind is LeafKind.NUMPY:
        is_host = isinstance(value, np.ndarray | np.generic)
        return is_host and _has_spec(leaf, value)
    sharding = getattr(value, "sharding", None)
    if sharding is not leaf.sharding and sharding != leaf.sharding:
        return False
    if leaf.kind is LeafKind.ARRAY:
        return _has_spec(leaf, value)
    return (
        is_key_type(value.dtype)
        and value.shape == leaf.spec.global_shape[:-1]  # key data have one dimension more
        and str(jax.random.key_impl(value)) == leaf.spec.key_impl
    )


def _has_spec(leaf: Leaf, value: Any) -> bool:
    return value.shape == leaf.spec.global_shape and value.dtype.name == leaf.spec.dtype


def _on_cpu(value: jax.Array) -> bool:
    # On CPU a view is the transfer; starting one costs 30 us a leaf for nothing.
    return next(iter(value.sharding.device_set)).platform == "cpu"


def _addressable_index(leaf: Leaf, shard: ShardId) -> int:
    if leaf.sharding is None:
        return 0
    boxes = boxes_by_device(leaf)
    me = jax.process_index()
    mine = [box for device, box in boxes.items() if device.process_index == me]
    if shard.box in mine:
        return mine.index(shard.box)
    if shard.box == whole(leaf.spec.global_shape) and len(mine) == 1:
        return 0
    raise StateMismatch("save", f"leaf {shard.leaf!r}", [f"{shard.leaf}: box {shard.box} not here"])
