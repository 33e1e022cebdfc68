"""Host to device: a restored state from host bytes, without a copy where JAX allows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format, Layout

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    box_at,
    boxes_by_device,
)
from emergency_ckpt.types import Box, ShardId

_MATRIX = 2
"""Dimensions from which on arrays have more than one layout."""

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
      like: gives the type of host leaves, and the layout of arrays on their devices.
      bytes_of: returns read-only uint8 arrays that must not change while the result lives: on CPU
        64-byte aligned memory becomes the array's own buffer.
      arrivals: shards available from ``bytes_of``, as they come; a leaf's transfer begins with its
        last shard. The others must be available when these are over, and are transferred then.
      stored_dtype: returns the stored dtype of the Python number with this path; called when the
        arrivals are over. None: that of ``tree``.
    """
    flat = jax.tree_util.tree_leaves(like)
    placing = _Placing(tree, flat, bytes_of)
    for shards in arrivals:
        with _as_they_are():
            placing.place(shards)
    values: dict[str, object] = {}
    for leaf in tree.leaves:
        if leaf.sharding is None:
            stored = leaf
            if leaf.number and stored_dtype is not None:
                dtype = stored_dtype(leaf.spec.path)
                stored = replace(leaf, spec=msgspec.structs.replace(leaf.spec, dtype=dtype))
            values[leaf.spec.path] = _host_value(stored, flat[leaf.position], bytes_of)
    with _as_they_are():
        values.update(placing.finish())
    return tree.unflatten(values)


def layout_of(leaf: object) -> Layout | None:
    """Return the layout of a leaf on its devices; None of a key, a host value, an open target."""
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    return layout if isinstance(layout, Layout) else None


def _in_layout_of(like: object, array: Any) -> Any:
    # A vector has one layout, and it takes JAX as long to tell it as to place the array.
    if getattr(array, "ndim", 0) < _MATRIX:
        return array
    layout = layout_of(like)
    if layout is None:
        return array
    there = array.format.layout
    if layout.major_to_minor == there.major_to_minor and layout.tiling in (None, there.tiling):
        return array
    shards = [each.data for each in array.addressable_shards]
    moved = jax.device_put(shards, [Format(layout, each.sharding) for each in shards])
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, moved, dtype=array.dtype
    )


@contextlib.contextmanager
def _as_they_are() -> Generator[None]:
    """Let JAX take all bytes: it cuts 8-byte types to 4 without x64, and a guard refuses them."""
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        yield


class _Placing:
    """The arrays of a state on this process's devices, leaf by leaf."""

    def __init__(self, tree: StateTree, like: Sequence[object], bytes_of: BytesOf) -> None:
        self._like = like
        self._bytes_of = bytes_of
        self._leaves: dict[str, Leaf] = {}
        self._missing: dict[str, set[Box]] = {}
        self._made: dict[str, object] = {}
        for leaf in tree.leaves:
            if leaf.sharding is not None:
                path = leaf.spec.path
                self._leaves[path] = leaf
                self._missing[path] = {
                    box for device, box in boxes_by_device(leaf).items() if _is_mine(device)
                }

    def place(self, shards: Iterable[ShardId]) -> None:
        """Make the arrays whose last shards these are."""
        for shard in shards:
            missing = self._missing.get(shard.leaf)
            if missing is None or shard.box not in missing:
                continue
            missing.discard(shard.box)
            if not missing:
                self._make(shard.leaf)

    def finish(self) -> dict[str, object]:
        """Make the remaining arrays; return all by path."""
        for path in list(self._missing):
            self._make(path)
        return self._made

    def _make(self, path: str) -> None:
        del self._missing[path]
        leaf = self._leaves[path]
        array = _array_of(leaf, self._bytes_of)
        if leaf.kind is LeafKind.KEYS:
            array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
        self._made[path] = _in_layout_of(self._like[leaf.position], array)


def _array_of(leaf: Leaf, bytes_of: BytesOf) -> jax.Array:
    """Return the leaf's array: in one call for all devices, and so without an array for each."""
    shape, path = leaf.spec.global_shape, leaf.spec.path

    def shard_at(index: tuple[slice, ...] | None) -> npt.NDArray[Any]:
        assert index is not None
        return _typed(leaf, ShardId(path, box_at(index, shape)), bytes_of)

    assert leaf.sharding is not None, "host values are not placed"
    # Of what it has no shard here it cannot tell the type; else looking it up takes longer.
    dtype = None if leaf.sharding.addressable_devices else dtype_named(leaf.spec.dtype)
    return jax.make_array_from_callback(shape, leaf.sharding, shard_at, dtype=dtype)


def _is_mine(device: Device) -> bool:
    return device.process_index == jax.process_index()


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
