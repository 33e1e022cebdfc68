"""The arrays of an item, and the part of each that this process writes, in host memory.

If several processes hold the same box, each stores an equal part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.core.placement.chunks import chunk_shape
from emergency_ckpt.core.restore.leaves import STORED_AS_UINT8
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.state.tree import Leaf, LeafKind, PyTree, StateTree, boxes_by_device
from emergency_ckpt.storage.writer_arrays import spread, storage_sharding
from emergency_ckpt.types import Box, ShardId

JAX_ARRAY, NUMPY_ARRAY, SCALAR = "jax.Array", "np.ndarray", "scalar"
"""Orbax's names of the types of leaves."""


class StoredPart(NamedTuple):
    """A box of an array. ``load``: returns its values, when they are written; called once."""

    box: Box
    nbytes: int
    load: Callable[[], npt.NDArray[Any]]


def loaded_part(box: Box, values: npt.NDArray[Any]) -> StoredPart:
    """Return a box whose values are in memory."""
    return StoredPart(box, values.nbytes, lambda: values)


@dataclasses.dataclass(frozen=True, eq=False)
class ItemArray:
    """One array as it is stored.

    Attributes:
      kind: Orbax's name of the leaf's type.
      write_shape: shape of the parts; the last of an axis is no smaller.
      sharding: the placement of the parts; None for host values.
      key_impl: implementation of PRNG keys; else None.
      parts: what this process writes.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    key_impl: str | None
    parts: tuple[StoredPart, ...]


class _Place(NamedTuple):
    """The place of leaves of one sharding, shape and dtype.

    Attributes:
      mine: the boxes that this process writes, each with the saved box that it is a part of.
    """

    sharding: jax.sharding.Sharding
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    mine: tuple[tuple[Box, Box], ...]


def item_state(
    tree: StateTree, shards: Mapping[ShardId, HostShard], writers: Sequence[int]
) -> PyTree:
    """Return the state with an ``ItemArray`` for each leaf, None for one without elements.

    Values are views of ``shards``.
    """
    values: dict[str, ItemArray | None] = {}
    # Leaves of one sharding and shape are stored alike, and the place costs more than the array.
    places: dict[tuple[object, ...], _Place] = {}
    hosts = {shard.leaf: shard for shard in shards}
    for leaf in tree.leaves:
        path, shape = leaf.spec.path, leaf.spec.global_shape
        if 0 in shape:
            values[path] = None
        elif leaf.sharding is None:
            is_mine = jax.process_index() == writers[0]
            values[path] = _host_array(leaf, _values(leaf, shards[hosts[path]]), is_mine=is_mine)
        else:
            key = (leaf.sharding, shape, leaf.kind, leaf.spec.dtype)
            place = places.get(key)
            if place is None:
                place = places[key] = _place_of(leaf, leaf.sharding, writers)
            values[path] = _device_array(leaf, place, shards)
    return tree.unflatten(values)


def _values(leaf: Leaf, shard: HostShard) -> npt.NDArray[Any]:
    """Return the shard's values, those with a dtype unknown to the storage format as bytes."""
    return shard.view.view(np.uint8) if leaf.spec.dtype in STORED_AS_UINT8 else shard.view


def _host_array(leaf: Leaf, values: npt.NDArray[Any], *, is_mine: bool) -> ItemArray:
    # Orbax does not support Python's complex.
    is_number = leaf.kind is LeafKind.SCALAR and values.dtype.kind != "c"
    shape = leaf.spec.global_shape
    return ItemArray(
        shape,
        values.dtype.name,
        SCALAR if is_number else NUMPY_ARRAY,
        shape,
        chunk_shape(shape, values.dtype.itemsize),
        None,
        None,
        (loaded_part(whole(shape), values),) if is_mine else (),
    )


def _device_array(leaf: Leaf, place: _Place, shards: Mapping[ShardId, HostShard]) -> ItemArray:
    dtype = "uint8" if leaf.spec.dtype in STORED_AS_UINT8 else leaf.spec.dtype
    return ItemArray(
        leaf.spec.global_shape,
        dtype,
        JAX_ARRAY,
        place.write_shape,
        place.chunk_shape,
        _of_key_data(place.sharding) if leaf.kind is LeafKind.KEYS else place.sharding,
        leaf.spec.key_impl,
        tuple(_cut(leaf, place, shards)),
    )


def _of_key_data(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding that JAX gives the data of PRNG keys with ``sharding``."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec, None))


def _cut(leaf: Leaf, place: _Place, shards: Mapping[ShardId, HostShard]) -> Iterator[StoredPart]:
    for saved, stored in place.mine:
        values = _values(leaf, shards[ShardId(leaf.spec.path, saved)])
        if stored != saved:
            values = values[
                tuple(
                    slice(start - begin, stop - begin)
                    for (start, stop), (begin, _) in zip(stored, saved, strict=True)
                )
            ]
        yield loaded_part(stored, values)


def _place_of(leaf: Leaf, sharding: jax.sharding.Sharding, writers: Sequence[int]) -> _Place:
    shape, me = leaf.spec.global_shape, jax.process_index()
    stored = held = storage_sharding(sharding, writers)
    # The array of a PRNG key has an axis that its sharding does not have.
    if len(writers) > 1 and leaf.kind is not LeafKind.KEYS:
        stored = spread(held, shape)
    saved = boxes_by_device(dataclasses.replace(leaf, sharding=held))
    boxes = boxes_by_device(dataclasses.replace(leaf, sharding=stored))
    # Of several that hold a box the first one writes it.
    writer_of: dict[Box, Any] = {}
    for device, box in boxes.items():
        if device.process_index in writers:
            writer_of.setdefault(box, device)
    missing = set(boxes.values()) - writer_of.keys()
    if missing:
        problem = f"no writer holds its box {min(missing)}"
        raise PersistentTierError("save", f"leaf {leaf.spec.path!r}", problem)
    write_shape = tuple(stop - start for start, stop in next(iter(boxes.values())))
    item_bytes = 1 if leaf.spec.dtype in STORED_AS_UINT8 else np.dtype(leaf.spec.dtype).itemsize
    return _Place(
        stored,
        write_shape,
        chunk_shape(write_shape, item_bytes),
        tuple((saved[dev], box) for box, dev in writer_of.items() if dev.process_index == me),
    )
