"""Host to device: a restored state from host bytes, which no restored array refers to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format, Layout

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.state.dtypes import dtype_named
from emergency_ckpt.state.link import find_link
from emergency_ckpt.state.tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    boxes_by_device,
)
from emergency_ckpt.types import Box, ShardId

_MATRIX = 2
"""Dimensions from which on arrays have more than one layout."""

BytesOf = Callable[[ShardId], npt.NDArray[np.uint8]]
Write = Callable[
    [Sequence[npt.NDArray[Any]], Sequence[jax.sharding.Sharding | None]], Sequence[jax.Array]
]
"""As ``Link.write``."""


def materialize(
    tree: StateTree,
    like: PyTree,
    bytes_of: BytesOf,
    arrivals: Iterable[Sequence[ShardId]] = (),
    stored_dtype: Callable[[str], str] | None = None,
    write: Write | None = None,
) -> PyTree:
    """Return the state that ``tree`` describes, with each shard's bytes from ``bytes_of``.

    Not collective. Blocks for the arrivals, and until the transfers to the devices have ended, also
    when it raises: the memory that ``bytes_of`` returns may then be written.

    Args:
      like: gives the type of host leaves, and the layout of arrays on their devices. An array that
        is committed to no device comes back uncommitted.
      bytes_of: returns uint8 arrays [nbytes]; called once for each shard of a device, by this
        thread.
      arrivals: shards available from ``bytes_of``, as they come. The transfer of a leaf begins with
        its last shard. All other shards must be available when the arrivals are over.
      stored_dtype: returns the stored dtype of the Python number with this path; called when the
        arrivals are over. None: that of ``tree``.
      write: ``write`` of the link to the devices; None: of the link of this process.
    """
    flat = jax.tree_util.tree_leaves(like)
    placing = _Placing(tree, flat, bytes_of, write or find_link().write)
    values: dict[str, object] = {}
    try:
        for shards in arrivals:
            with _as_they_are():
                placing.place(shards)
        for leaf in tree.leaves:
            if leaf.sharding is None:
                stored = leaf
                if leaf.number and stored_dtype is not None:
                    dtype = stored_dtype(leaf.spec.path)
                    stored = replace(leaf, spec=msgspec.structs.replace(leaf.spec, dtype=dtype))
                values[leaf.spec.path] = _host_value(stored, flat[leaf.position], bytes_of)
        with _as_they_are():
            values.update(placing.finish())
    finally:
        placing.wait()
    return tree.unflatten(values)


def layout_of(leaf: object) -> Layout | None:
    """Return the layout of a leaf on its devices; None of a key, a host value, an open target."""
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    return layout if isinstance(layout, Layout) else None


def _in_layout_of(like: object, array: Any) -> Any:
    # A vector has one layout, and JAX needs as long to return the layout as to place the array.
    if getattr(array, "ndim", 0) < _MATRIX:
        return array
    layout = layout_of(like)
    if layout is None:
        return array
    there = array.format.layout
    if layout.major_to_minor == there.major_to_minor and layout.tiling in (None, there.tiling):
        return array
    shards = [shard.data for shard in array.addressable_shards]
    moved = jax.device_put(shards, [Format(layout, data.sharding) for data in shards])
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

    def __init__(
        self, tree: StateTree, like: Sequence[object], bytes_of: BytesOf, write: Write
    ) -> None:
        self._like = like
        self._write = write
        self._bytes_of = bytes_of
        self._leaves: dict[str, Leaf] = {}
        self._missing: dict[str, set[Box]] = {}
        self._made: dict[str, Any] = {}
        self._begun: list[jax.Array] = []
        for leaf in tree.leaves:
            if leaf.sharding is not None:
                path = leaf.spec.path
                self._leaves[path] = leaf
                self._missing[path] = {
                    box for device, box in boxes_by_device(leaf).items() if _is_mine(device)
                }

    def place(self, shards: Iterable[ShardId]) -> None:
        """Make the arrays whose last shards these are."""
        whole_leaves: list[str] = []
        for shard in shards:
            missing = self._missing.get(shard.leaf)
            if missing is None or shard.box not in missing:
                continue
            missing.discard(shard.box)
            if not missing:
                whole_leaves.append(shard.leaf)
        self._make(whole_leaves)

    def finish(self) -> dict[str, object]:
        """Make the remaining arrays; return all by path."""
        self._make(list(self._missing))
        return self._made

    def wait(self) -> None:
        """Wait for the transfers that have begun."""
        jax.block_until_ready(self._begun)

    def _make(self, paths: Sequence[str]) -> None:
        """Make the arrays of these leaves, with the transfers of all in one call."""
        places: list[_Place] = []
        for path in paths:
            del self._missing[path]
            leaf = self._leaves[path]
            assert leaf.sharding is not None, "host values are not placed"
            views: dict[Box, npt.NDArray[Any]] = {}
            for device, box in boxes_by_device(leaf).items():
                if _is_mine(device):
                    if box not in views:
                        views[box] = _typed(leaf, ShardId(path, box), self._bytes_of)
                    target: jax.sharding.Sharding | None = None
                    if not _is_uncommitted(self._like[leaf.position]):
                        kind = leaf.sharding.memory_kind
                        target = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                    places.append(_Place(path, target, views[box]))
        arrays: Sequence[jax.Array] = ()
        if places:
            arrays = self._write(
                [place.view for place in places], [place.target for place in places]
            )
            self._begun += arrays
        parts: dict[str, list[jax.Array]] = {path: [] for path in paths}
        for place, array in zip(places, arrays, strict=True):
            parts[place.path].append(array)
        for path, on_devices in parts.items():
            leaf = self._leaves[path]
            assert leaf.sharding is not None, "host values are not placed"
            # JAX cannot tell the type of an array without a shard here; else the look-up takes
            # longer.
            dtype = None if on_devices else dtype_named(leaf.spec.dtype)
            if _is_uncommitted(self._like[leaf.position]):
                (array,) = on_devices
            else:
                array = jax.make_array_from_single_device_arrays(
                    leaf.spec.global_shape, leaf.sharding, on_devices, dtype=dtype
                )
            if leaf.kind is LeafKind.KEYS:
                array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
            self._made[path] = _in_layout_of(self._like[leaf.position], array)


class _Place(NamedTuple):
    """The place of a shard on one device."""

    path: str
    target: jax.sharding.Sharding | None
    view: npt.NDArray[Any]


def _is_uncommitted(like: object) -> bool:
    """Return whether JAX may move an array, as one that nobody has placed, to a computation."""
    if isinstance(like, jax.Array):
        return not like.committed
    return getattr(like, "sharding", None) is None


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
