"""How a state is given to Orbax when only the processes of one slice write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

# What Orbax's default array handler keeps PRNG implementations in has no public name.
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata.array_metadata import SerializedArrayMetadata
from orbax.checkpoint.future import Future

from emergency_ckpt.tiers.state_tree import LeafKind, PyTree, StateTree, boxes_by_device
from emergency_ckpt.types import ShardId


def as_arrays(
    tree: StateTree, views: Mapping[ShardId, npt.NDArray[Any]], writers: Sequence[int]
) -> PyTree:
    """The state as arrays made from host memory, of which the writers hold the first replica.

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
            sharding = _storage_sharding(leaf.sharding, writers)
            boxes = {
                device: box
                for device, box in boxes_by_device(replace(leaf, sharding=sharding)).items()
                if device.process_index == jax.process_index()
            }
            kind = _host_memory(sharding)
            array = jax.make_array_from_single_device_arrays(
                leaf.spec.global_shape,
                sharding.with_memory_kind(kind),
                [
                    jax.device_put(
                        views[ShardId(path, box)],
                        jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
                    )
                    for device, box in boxes.items()
                ],
            )
            if leaf.kind is LeafKind.KEYS:
                array = jax.random.wrap_key_data(array, impl=leaf.spec.key_impl)
            values[path] = array
    return tree.unflatten(values)


def _host_memory(sharding: jax.sharding.Sharding) -> str:
    device = next(iter(sharding.device_set))
    return device.default_memory().kind if device.platform == "cpu" else "pinned_host"


class _WritersOnly(array_metadata_store.Validator):
    """Orbax's own checks between writers; a single one has nothing to be compared with."""

    def validate_all_array_metadatas(
        self, array_metadatas: dict[int, list[SerializedArrayMetadata]]
    ) -> None:
        if len(array_metadatas) > 1:
            super().validate_all_array_metadatas(array_metadatas)


class ArrayWriter(ocp.type_handlers.ArrayHandler):
    """Orbax's own, whose writes can be cancelled. For one save.

    A single writer does not share the work with the other replicas.
    """

    def __init__(self, writers: Sequence[int]) -> None:
        super().__init__(
            primary_host=writers[0],
            use_replica_parallel=len(writers) > 1,
            array_metadata_store=array_metadata_store.Store(),
        )
        self._begun: list[Future] = []

    async def serialize(self, *args: Any, **kwargs: Any) -> Sequence[Future]:
        """As Orbax's."""
        futures = await super().serialize(*args, **kwargs)
        self._begun += futures
        return futures

    def cancel(self) -> None:
        """Nobody waits for what is being written any more. From any thread; does not block."""
        for future in self._begun:
            future.cancel()


def writing_handler(
    together: ocp.options.MultiprocessingOptions, arrays: ArrayWriter, *, at_once_bytes: int
) -> ocp.PyTreeCheckpointHandler:
    """Orbax's own handler; ``at_once_bytes``: how much may be on its way to storage at once."""
    scalars, numpys = ocp.type_handlers.ScalarHandler(), ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (int, scalars), (float, scalars), (np.ndarray, numpys), (jax.Array, arrays)
    )
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=-(-at_once_bytes // 10**9) + 1,
        multiprocessing_options=together,
        type_handler_registry=registry,
        array_metadata_validator=_WritersOnly(),
    )


def _storage_sharding(
    sharding: jax.sharding.Sharding, writers: Sequence[int]
) -> jax.sharding.Sharding:
    """A sharding that Orbax takes, whose first replica lies on the writers.

    Orbax refuses arrays that one process of several holds alone. So what a single writer stores
    stays on the whole mesh, with the primary slice moved to its front; and what each process holds
    for itself counts as replicated over the processes.
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
