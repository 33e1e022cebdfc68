"""Host to device: a restored state from host bytes, without a copy where JAX allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import msgspec
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    boxes_by_device,
)
from emergency_ckpt.types import Box, ShardId

BytesOf = Callable[[ShardId], npt.NDArray[np.uint8]]


def materialize(
    tree: StateTree,
    like: PyTree,
    bytes_of: BytesOf,
    arrivals: Iterable[Sequence[ShardId]] = (),
    stored_dtype: Callable[[str], str] | None = None,
) -> PyTree:
    """Return the state that ``tree`` describes, with each shard's bytes from ``bytes_of``.

    Not collective. Blocks for the arrivals, and until the transfers to the devices have begun.

    Args:
      like: gives the type of host leaves.
      bytes_of: returns read-only uint8 arrays that must not change while the result lives: on CPU
        64-byte aligned memory becomes the array's own buffer.
      arrivals: shards available from ``bytes_of``, as they come; their transfer begins at once. The
        others must be available when these are over, and are transferred together then.
      stored_dtype: returns the stored dtype of the Python number with this path; called when the
        arrivals are over. None: that of ``tree``.
    """
    flat = jax.tree_util.tree_leaves(like)
    placing = _Placing(tree, bytes_of)
    for shards in arrivals:
        placing.place(shards)
    values: dict[str, object] = {}
    for leaf in tree.leaves:
        if leaf.sharding is None:
            stored = leaf
            if leaf.number and stored_dtype is not None:
                dtype = stored_dtype(leaf.spec.path)
                stored = replace(leaf, spec=msgspec.structs.replace(leaf.spec, dtype=dtype))
            values[leaf.spec.path] = _host_value(stored, flat[leaf.position], bytes_of)
    values.update(placing.finish())
    return tree.unflatten(values)


class _Placing:
    """The arrays of a state on this process's devices, shard by shard."""

    def __init__(self, tree: StateTree, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._boxes: list[tuple[Leaf, dict[Device, Box]]] = []
        self._missing: dict[ShardId, tuple[Leaf, list[Device]]] = {}
        self._placed: dict[tuple[str, Device], jax.Array] = {}
        for leaf in tree.leaves:
            if leaf.sharding is None:
                continue
            mine = {d: b for d, b in boxes_by_device(leaf).items() if _is_mine(d)}
            self._boxes.append((leaf, mine))
            for device, box in mine.items():
                shard = ShardId(leaf.spec.path, box)
                self._missing.setdefault(shard, (leaf, []))[1].append(device)

    def place(self, shards: Iterable[ShardId]) -> None:
        """Begin the transfer of the shards that are needed here, all in one call."""
        blocks: list[npt.NDArray[Any]] = []
        where: list[tuple[str, Device]] = []
        targets: list[Device | jax.sharding.Sharding] = []
        for shard in shards:
            found = self._missing.pop(shard, None)
            if found is None:
                continue
            leaf, devices = found
            block = _typed(leaf, shard, self._bytes_of)
            blocks += [block] * len(devices)
            where += [(shard.leaf, device) for device in devices]
            targets += [_place(leaf, device) for device in devices]
        if blocks:
            arrays = jax.device_put(blocks, targets)
            self._placed.update(zip(where, arrays, strict=True))

    def finish(self) -> dict[str, object]:
        """Place the remaining shards; return the arrays by path."""
        self.place(list(self._missing))
        values: dict[str, object] = {}
        for leaf, boxes in self._boxes:
            path = leaf.spec.path
            assert leaf.sharding is not None, "host values are not placed"
            array = jax.make_array_from_single_device_arrays(
                leaf.spec.global_shape,
                leaf.sharding,
                [self._placed.pop((path, device)) for device in boxes],
                dtype=dtype_named(leaf.spec.dtype),
            )
            if leaf.kind is LeafKind.KEYS:
                array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
            values[path] = array
        return values


def _is_mine(device: Device) -> bool:
    return device.process_index == jax.process_index()


def _place(leaf: Leaf, device: Device) -> Device | jax.sharding.Sharding:
    # Without a memory kind the device itself, because JAX transfers faster to plain devices.
    kind = None if leaf.sharding is None else leaf.sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _typed(leaf: Leaf, shard: ShardId, bytes_of: BytesOf) -> npt.NDArray[Any]:
    shape = tuple(stop - start for start, stop in shard.box)
    return bytes_of(shard).view(dtype_named(leaf.spec.dtype)).reshape(shape)


def _host_value(leaf: Leaf, like: object, bytes_of: BytesOf) -> object:
    shard = ShardId(leaf.spec.path, whole(leaf.spec.global_shape))
    value = _typed(leaf, shard, bytes_of).copy()
    if leaf.kind is LeafKind.SCALAR:
        kind: Any = type(like)
        return kind(value.item())
    # Stored little-endian; the target has the caller's byte order.
    value = value.astype(cast("npt.NDArray[Any]", like).dtype, copy=False)
    return value[()] if isinstance(like, np.generic) else value
