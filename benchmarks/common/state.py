"""The state of the job: float32 normals, replicated over slices and sharded inside a slice."""

import hashlib
from typing import Any

import jax
import numpy as np

from benchmarks.common.job import ROW_ITEMS, Shape

PyTree = Any
REPLICA_AXIS = 0


def make_mesh(shape: Shape) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()).reshape(shape.slices, shape.hosts_per_slice)
    return jax.sharding.Mesh(devices, ("slice", "fsdp"))


def abstract_state(shape: Shape, mesh: jax.sharding.Mesh) -> PyTree:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    leaf = jax.ShapeDtypeStruct(
        (shape.rows_per_leaf, ROW_ITEMS), np.dtype(np.float32), sharding=sharding
    )
    return {f"leaf_{i:05}": leaf for i in range(shape.leaves)}


def first_state(abstract: PyTree) -> PyTree:
    """Return standard normals per (leaf, box): equal on all slices, different otherwise."""

    def draw(number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def box_values(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(leaf.shape[0])
            random = np.random.Generator(np.random.SFC64([number, start]))
            return random.standard_normal((stop - start, *leaf.shape[1:]), dtype=np.float32)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, box_values)

    return {name: draw(i, leaf) for i, (name, leaf) in enumerate(sorted(abstract.items()))}


def train_step(state: PyTree) -> PyTree:
    """Change every value a little and consume the argument, as an optimizer's step does."""
    return {name: _step(leaf) for name, leaf in state.items()}


# All leaves are alike. A program of thousands of them would compile for seconds in each process.
@jax.jit(donate_argnums=0)
def _step(leaf: jax.Array) -> jax.Array:
    return leaf * np.float32(0.9995) + np.float32(1e-4)


def digests(state: PyTree) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of each shard of this process, by leaf and box."""
    return {
        f"{name} {_box(shard.index, array.shape)}": _digest(np.asarray(shard.data))
        for name, array in state.items()
        for shard in array.addressable_shards
    }


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ranges = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def _digest(values: np.ndarray) -> str:
    content = hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data)
    return f"{values.dtype} {values.shape} {content.hexdigest()}"
