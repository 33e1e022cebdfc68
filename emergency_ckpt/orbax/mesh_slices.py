"""The slices of a mesh, as Orbax's emergency manager counts them."""

from __future__ import annotations

import jax

from emergency_ckpt.cluster.topology import replicated_axis
from emergency_ckpt.state.tree import BoxTable, PyTree, describe


def slice_count(mesh: jax.sharding.Mesh, axis: int) -> int:
    """Return the number of slices along ``axis``; ValueError when it is no axis of ``mesh``."""
    if mesh.devices.ndim == 1:
        return 1  # as in Orbax: no axis is left to be a replica axis
    if not 0 <= axis < mesh.devices.ndim:
        raise ValueError(f"replica_axis_index {axis} is no axis of the mesh {mesh.axis_names}")
    return mesh.devices.shape[axis]


def replica_axis_of(mesh: jax.sharding.Mesh, axis: int, state: PyTree) -> int | None:
    """Return the axis of the slices: ``axis``, unless it has size 1; None where there is one slice.

    A mesh may begin with axes of size 1 that a run does not use, as MaxText's with ``diloco``. Then
    it is the axis along which ``state`` is replicated over several hosts. ValueError as
    ``slice_count``.
    """
    if slice_count(mesh, axis) > 1:
        return axis
    held = BoxTable(describe(state, "open"), jax.process_count()).held_leaves()
    return replicated_axis(mesh, held, needs_whole=True)
