"""The state as Orbax takes it: ordinary arrays over the writers' devices, from host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from emergency_ckpt.tiers.state_tree import LeafKind, PyTree, StateTree, boxes_by_device
from emergency_ckpt.types import ShardId


def as_arrays(
    tree: StateTree, views: Mapping[ShardId, npt.NDArray[Any]], writers: Sequence[int]
) -> PyTree:
    """The state as arrays over the writers' devices alone, made from host memory.

    On CPU the memory is shared; elsewhere it is pinned host memory: device memory is not touched.
    """
    values: dict[str, object] = {}
    for leaf in tree.leaves:
        path = leaf.spec.path
        if 0 in leaf.spec.global_shape:
            values[path] = None
        elif leaf.sharding is None:
            view = next(v for shard, v in views.items() if shard.leaf == path)
            values[path] = view.item() if leaf.kind is LeafKind.SCALAR else view
        else:
            sharding = _writers_sharding(leaf.sharding, writers)
            boxes = {
                device: box
                for device, box in boxes_by_device(leaf).items()
                if device in sharding.device_set and device.process_index == jax.process_index()
            }
            kind = None if sharding.device_set and _platform(sharding) == "cpu" else "pinned_host"
            array = jax.make_array_from_single_device_arrays(
                leaf.spec.global_shape,
                sharding if kind is None else sharding.with_memory_kind(kind),
                [
                    jax.device_put(
                        views[ShardId(path, box)],
                        jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
                    )
                    for device, box in boxes.items()
                ],
            )
            if array.is_fully_addressable and jax.process_count() > 1:
                # Orbax refuses arrays of one process in a job of several; of a slice that is one
                # process it takes host arrays, keys as their data.
                values[path] = np.asarray(array)
                continue
            if leaf.kind is LeafKind.KEYS:
                array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
            values[path] = array
    return tree.unflatten(values)


def _platform(sharding: jax.sharding.Sharding) -> str:
    return next(iter(sharding.device_set)).platform


def _writers_sharding(
    sharding: jax.sharding.Sharding, writers: Sequence[int]
) -> jax.sharding.Sharding:
    """``sharding`` restricted to the devices of ``writers``, along whole rows of its mesh."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    mesh = sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = mesh.devices
    for axis in range(devices.ndim):
        rows = [
            index
            for index in range(devices.shape[axis])
            if all(d.process_index in writers for d in np.take(devices, index, axis).flat)
        ]
        if rows and len(rows) < devices.shape[axis]:
            devices = np.take(devices, rows, axis)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, mesh.axis_names), sharding.spec)
