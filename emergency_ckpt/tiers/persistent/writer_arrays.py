"""The arrays that each writer passes to Orbax, in host memory.

If several processes hold the same box, each stores an equal part of it. Orbax would slice such
arrays itself, with one compiled program each (a fifth of the time for thousands of leaves), into
new memory; small arrays in pinned memory one process would write alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import tensorstore

from emergency_ckpt.core.restore.leaves.stored_leaves import STORED_AS_UINT8
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.state.tree import (
    Device,
    Leaf,
    LeafKind,
    PyTree,
    StateTree,
    boxes_by_device,
)
from emergency_ckpt.types import Box, ShardId


def as_arrays(
    tree: StateTree, shards: Mapping[ShardId, HostShard], writers: Sequence[int]
) -> PyTree:
    """Return the state as arrays in host memory, of which the writers hold the first replica.

    An existing array there is used as it is. On CPU other memory is shared; elsewhere it is copied
    to pinned host memory. No device memory is used.
    """
    values: dict[str, object] = {}
    shards = _in_dtypes_of_storage(tree, shards)
    views = {shard.leaf: each.view for shard, each in shards.items()}
    # Leaves of one sharding and shape are stored alike, and the place costs more than the array.
    places: dict[tuple[object, ...], _Place] = {}
    arrays: list[_Parts] = []
    for leaf in tree.leaves:
        path, shape = leaf.spec.path, leaf.spec.global_shape
        if 0 in shape:
            values[path] = None
        elif leaf.sharding is None:
            view = views[path]
            # Orbax does not support Python's complex.
            is_number = leaf.kind is LeafKind.SCALAR and view.dtype.kind != "c"
            values[path] = view.item() if is_number else view
        else:
            key = (leaf.sharding, shape, leaf.kind)
            place = places.get(key)
            if place is None:
                place = places[key] = _place_of(leaf, leaf.sharding, writers)
            arrays.append(_Parts(leaf, place, _cut(leaf, place, shards)))
    values.update(_put_together(arrays))
    return tree.unflatten(values)


def _in_dtypes_of_storage(
    tree: StateTree, shards: Mapping[ShardId, HostShard]
) -> Mapping[ShardId, HostShard]:
    """Return ``shards``, those with a dtype unknown to the storage format as uint8 bytes."""
    carried = {leaf.spec.path for leaf in tree.leaves if leaf.spec.dtype in STORED_AS_UINT8}
    if not carried:
        return shards
    return {
        shard: HostShard(each.view.view(np.uint8), None) if shard.leaf in carried else each
        for shard, each in shards.items()
    }


class _Place(NamedTuple):
    """The place of leaves of one sharding and shape.

    Attributes:
      sharding: of all writers' parts.
      mine: for each device of this process, the saved box and the part of it to store.
    """

    sharding: jax.sharding.Sharding
    mine: dict[Device, tuple[Box, Box]]


class _Parts(NamedTuple):
    leaf: Leaf
    place: _Place
    shards: dict[Device, HostShard]


def _place_of(leaf: Leaf, sharding: jax.sharding.Sharding, writers: Sequence[int]) -> _Place:
    held = _storage_sharding(sharding, writers)
    stored = held
    # The array of a PRNG key has an axis that its sharding does not have.
    if len(writers) > 1 and leaf.kind is not LeafKind.KEYS:
        stored = spread(held, leaf.spec.global_shape)
    saved = boxes_by_device(replace(leaf, sharding=held))
    me = jax.process_index()
    return _Place(
        stored,
        {
            device: (saved[device], box)
            for device, box in boxes_by_device(replace(leaf, sharding=stored)).items()
            if device.process_index == me
        },
    )


def spread(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> jax.sharding.Sharding:
    """Return ``sharding`` with each box divided evenly over all devices that hold it.

    The box is divided along the first divisible axis, as Orbax does. Without such an axis, or
    without a NamedSharding, the result is ``sharding``.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    parts = [*sharding.spec, *(None for _ in range(len(shape) - len(sharding.spec)))]
    along = [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]
    used = {name for names in along for name in names}
    unused = [name for name in sharding.mesh.axis_names if name not in used]
    copies = math.prod(sharding.mesh.shape[name] for name in unused)
    for axis, size in enumerate(sharding.shard_shape(tuple(shape))):
        if copies > 1 and size % copies == 0:
            along[axis] = (*along[axis], *unused)
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*along))
    return sharding


def _cut(leaf: Leaf, place: _Place, shards: Mapping[ShardId, HostShard]) -> dict[Device, HostShard]:
    found: dict[Device, HostShard] = {}
    for device, (saved, stored) in place.mine.items():
        shard = shards[ShardId(leaf.spec.path, saved)]
        if stored != saved:
            index = tuple(
                slice(start - begin, stop - begin)
                for (start, stop), (begin, _) in zip(stored, saved, strict=True)
            )
            shard = HostShard(shard.view[index], None)
        found[device] = shard
    return found


def _put_together(arrays: Sequence[_Parts]) -> dict[str, jax.Array]:
    kinds = [_memory_kind(each.place.sharding, each.shards.values()) for each in arrays]
    placed = iter(
        _placed(
            [
                (shard, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
                for each, kind in zip(arrays, kinds, strict=True)
                for device, shard in each.shards.items()
            ]
        )
    )
    found: dict[str, jax.Array] = {}
    for (leaf, place, shards), kind in zip(arrays, kinds, strict=True):
        array = jax.make_array_from_single_device_arrays(
            leaf.spec.global_shape,
            place.sharding.with_memory_kind(kind),
            [next(placed) for _ in shards],
        )
        if leaf.kind is LeafKind.KEYS:
            array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
        found[leaf.spec.path] = array
    return found


def _memory_kind(sharding: jax.sharding.Sharding, shards: Iterable[HostShard]) -> str:
    for shard in shards:
        if shard.array is not None and shard.array.sharding.memory_kind is not None:
            return shard.array.sharding.memory_kind
    device = next(iter(sharding.device_set))
    return device.default_memory().kind if device.platform == "cpu" else "pinned_host"


def _placed(
    wanted: Sequence[tuple[HostShard, jax.sharding.SingleDeviceSharding]],
) -> list[jax.Array]:
    """Return an array of each shard on its device, in the given order; reuse those that exist."""

    def source(shard: HostShard, on: jax.sharding.SingleDeviceSharding) -> object:
        there = shard.array is not None and shard.array.sharding.device_set == on.device_set
        return shard.array if there else shard.view

    # One call for all, because thousands of calls take twice as long.
    return jax.device_put([source(*each) for each in wanted], [on for _, on in wanted])


def _storage_sharding(
    sharding: jax.sharding.Sharding, writers: Sequence[int]
) -> jax.sharding.Sharding:
    """Return a sharding that Orbax accepts, whose first replica is on the writers.

    Orbax refuses arrays that one process of several holds alone. So the arrays of a single writer
    stay on the whole mesh, with the primary slice moved to its front; arrays that each process
    holds for itself count as replicated over the processes.
    """
    count = jax.process_count()
    if count == 1:
        return sharding
    alone = len(writers) == 1
    if len({device.process_index for device in sharding.device_set}) == 1:
        first = {device.process_index: device for device in reversed(jax.devices())}
        order = [*writers, *(p for p in range(count) if alone and p not in writers)]
        mesh = jax.sharding.Mesh(np.array([first[process] for process in order]), ("process",))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    mesh = sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = mesh.devices
    for axis in range(devices.ndim):
        rows = [
            index
            for index in range(devices.shape[axis])
            if all(d.process_index in writers for d in np.take(devices, [index], axis).flat)
        ]
        if rows and len(rows) < devices.shape[axis]:
            others = [index for index in range(devices.shape[axis]) if index not in rows]
            devices = np.take(devices, [*rows, *others] if alone else rows, axis)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, mesh.axis_names), sharding.spec)


def check_storable(tree: StateTree) -> None:
    """Raise InvalidState for a state that Orbax's format cannot hold.

    That is an empty state, a leaf of an unsupported dtype, or two leaves with one name, since Orbax
    joins the keys of each path with dots.
    """
    if not tree.leaves and not tree.unflatten({}):
        raise InvalidState(
            "save", "the state", "it is empty: the persistent tier has no such steps"
        )
    _check_names(tree)
    for leaf in tree.leaves:
        if leaf.spec.dtype in STORED_AS_UINT8:
            continue
        try:
            tensorstore.dtype(leaf.spec.dtype)
        except ValueError as error:
            raise InvalidState(
                "save",
                f"leaf {leaf.spec.path!r}",
                f"the persistent tier cannot store dtype {leaf.spec.dtype}",
                hint="store it as another dtype, or use the local tier only",
            ) from error


def _check_names(tree: StateTree) -> None:
    # Without dots in keys, other paths are other names: a start need not import Orbax to see it.
    if not any("." in leaf.spec.path or leaf.spec.path.endswith("/") for leaf in tree.leaves):
        return
    import orbax.checkpoint as ocp  # noqa: PLC0415

    paths = tree.unflatten({leaf.spec.path: leaf.spec.path for leaf in tree.leaves})
    names = ocp.tree.get_param_names(paths, include_empty_nodes=False)
    taken: dict[str, str] = {}
    for path, name in zip(jax.tree.leaves(paths), jax.tree.leaves(names), strict=True):
        place = name if name.endswith("/") else f"{name}/"
        other = taken.setdefault(place, path)
        if other != path:
            raise InvalidState(
                "save",
                f"leaves {other!r} and {path!r}",
                f"the persistent tier would store both as {name!r}, one over the other",
                hint="rename a key, or use the local tier only",
            )
