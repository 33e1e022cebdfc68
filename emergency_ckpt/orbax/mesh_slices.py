"""The slices of a mesh, as Orbax's emergency manager counts them."""

from __future__ import annotations

import jax
import numpy as np


def slice_count(mesh: jax.sharding.Mesh, axis: int) -> int:
    """Return the number of slices along ``axis``; ValueError when it is no axis of ``mesh``."""
    if mesh.devices.ndim == 1:
        return 1  # as in Orbax: no axis is left to be a replica axis
    if not 0 <= axis < mesh.devices.ndim:
        raise ValueError(f"replica_axis_index {axis} is no axis of the mesh {mesh.axis_names}")
    return mesh.devices.shape[axis]


def as_one_slice(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return ``mesh`` with a replica axis of size 1 in front."""
    return jax.sharding.Mesh(mesh.devices[np.newaxis], ("emergency_ckpt_slice", *mesh.axis_names))
