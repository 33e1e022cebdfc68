"""The slice of each process, from meshes and devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from emergency_ckpt.core.placement.placement_policies import Topology, replicated_bytes
from emergency_ckpt.core.placement.striping import HeldLeaves
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.state.tree import StateTree


def topology_of(
    mesh: jax.sharding.Mesh | None,
    replica_axis: str | int | None,
    tree: StateTree,
    held: Sequence[HeldLeaves],
    *,
    needs_whole: bool,
) -> Topology:
    """Return the slice of each process. Not collective. ``replica_axis``: see ``Config``.

    From the coordinate on ``replica_axis`` of ``mesh``; without a mesh from the devices'
    ``slice_index`` where they differ; else from the mesh of the state's own shardings; else there
    is one slice. Slices that share a process are merged, because they fail together. ConfigError
    when ``replica_axis`` is no axis of the mesh that was found. ``held``, ``needs_whole``: as
    ``replicated_axis``, which chooses where ``replica_axis`` is None.
    """
    one = Topology(jax.process_count(), (0,) * jax.process_count())
    if mesh is None:
        by_index = {(d.process_index, getattr(d, "slice_index", 0) or 0) for d in jax.devices()}
        if len({index for _, index in by_index}) > 1:
            return _merged(by_index, jax.process_count())
        mesh = _mesh_of(tree)
    if mesh is None:
        return one
    if replica_axis is None:
        axis = replicated_axis(mesh, held, needs_whole=needs_whole)
        return one if axis is None else _along(mesh, axis)
    return _along(mesh, _axis_of(mesh, replica_axis))


def replicated_axis(
    mesh: jax.sharding.Mesh, held: Sequence[HeldLeaves], *, needs_whole: bool
) -> int | None:
    """Return the axis of ``mesh`` along which the most bytes are replicated, the first of equals.

    The same on all processes. Only axes with several slices count: a mesh may begin with axes of
    size 1, as MaxText's with ``diloco``, or have axes inside a host, and along neither would
    another host have a copy. None where nothing is replicated; with ``needs_whole`` (a slice must
    hold the whole state, to write it to storage) also where a part of the state is not.

    Args:
      held: the processes that hold each part of the state.
    """
    chosen, most = None, 0
    for axis in range(mesh.devices.ndim):
        topology = _along(mesh, axis)
        if len(topology.slices) == 1:
            continue
        replicated, total = replicated_bytes(topology, held)
        if replicated > most and (replicated == total or not needs_whole):
            chosen, most = axis, replicated
    return chosen


def _along(mesh: jax.sharding.Mesh, axis: int) -> Topology:
    pairs = {
        (device.process_index, coordinate[axis])
        for coordinate, device in np.ndenumerate(mesh.devices)
    }
    return _merged(pairs, jax.process_count())


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
