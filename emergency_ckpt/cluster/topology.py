"""The slice of each process, from meshes and devices."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from emergency_ckpt.core.placement.policies import Topology
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.state.tree import StateTree


def topology_of(
    mesh: jax.sharding.Mesh | None, replica_axis: str | int | None, tree: StateTree
) -> Topology:
    """Return the slice of each process. Not collective. ``replica_axis``: see ``Config``.

    From the coordinate on ``replica_axis`` of ``mesh``; without a mesh from the devices'
    ``slice_index`` where they differ; else from the mesh of the state's own shardings; else there
    is one slice. Slices that share a process are merged, because they fail together. ConfigError
    when ``replica_axis`` is no axis of the mesh that was found.
    """
    process_count = jax.process_count()
    if mesh is None:
        by_index = {(d.process_index, getattr(d, "slice_index", 0) or 0) for d in jax.devices()}
        if len({index for _, index in by_index}) > 1:
            return _merged(by_index, process_count)
        mesh = _mesh_of(tree)
    if mesh is None:
        return Topology(process_count, (0,) * process_count)
    axis = unsplit_axis(mesh, tree) if replica_axis is None else _axis_of(mesh, replica_axis)
    if axis is None:
        return Topology(process_count, (0,) * process_count)
    pairs = {
        (device.process_index, coordinate[axis])
        for coordinate, device in np.ndenumerate(mesh.devices)
    }
    return _merged(pairs, process_count)


def _axis_of(mesh: jax.sharding.Mesh, replica_axis: str | int) -> int:
    axes = mesh.axis_names
    if isinstance(replica_axis, str):
        if replica_axis in axes:
            return axes.index(replica_axis)
    elif 0 <= replica_axis < len(axes):
        return replica_axis
    problem = f"replica_axis {replica_axis!r} is none of the axes {axes} of the mesh"
    raise ConfigError([f"{problem}; without the setting mesh, it is that of the state's shardings"])


def _mesh_of(tree: StateTree) -> jax.sharding.Mesh | None:
    for leaf in tree.leaves:
        if isinstance(leaf.sharding, jax.sharding.NamedSharding) and leaf.sharding.mesh.size > 1:
            mesh = leaf.sharding.mesh
            if isinstance(mesh, jax.sharding.Mesh):
                return mesh
    return None


def unsplit_axis(mesh: jax.sharding.Mesh, tree: StateTree) -> int | None:
    """Return the first axis of ``mesh`` with several positions along which no leaf is split."""
    split: set[str] = set()
    for leaf in tree.leaves:
        if isinstance(leaf.sharding, jax.sharding.NamedSharding):
            for part in leaf.sharding.spec:
                split.update((part,) if isinstance(part, str) else part or ())
    for axis, name in enumerate(mesh.axis_names):
        if name not in split and mesh.shape[name] > 1:
            return axis
    return None


def _merged(pairs: Iterable[tuple[int, int]], process_count: int) -> Topology:
    """Return a topology from (process, replica index); indices that share a process merge."""
    indices_of: dict[int, set[int]] = {}
    for process, index in pairs:
        indices_of.setdefault(process, set()).add(index)
    merged_into: dict[int, int] = {}

    def root(index: int) -> int:
        while merged_into.get(index, index) != index:
            index = merged_into[index]
        return index

    for indices in indices_of.values():
        roots = sorted({root(index) for index in indices})
        for other in roots[1:]:
            merged_into[other] = roots[0]
    roots_of = {process: root(min(indices)) for process, indices in indices_of.items()}
    # The slice of process 0 is the primary one, because Orbax writes host values there.
    leading = roots_of.get(0)
    order = sorted(set(roots_of.values()), key=lambda index: (index != leading, index))
    number = {index: n for n, index in enumerate(order)}
    # A process without devices in the mesh stores nothing and is assigned to the primary slice.
    return Topology(
        process_count,
        tuple(number[roots_of[p]] if p in roots_of else 0 for p in range(process_count)),
    )
