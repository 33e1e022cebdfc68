"""The division of arrays among the processes that write them, and the check of their dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
import tensorstore

from emergency_ckpt.core.restore.leaves import STORED_AS_UINT8
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.tree import StateTree


def spread(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> jax.sharding.Sharding:
    """Return ``sharding`` with each box divided evenly over all devices that have the box.

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


def storage_sharding(
    sharding: jax.sharding.Sharding, writers: Sequence[int]
) -> jax.sharding.Sharding:
    """Return a sharding whose first replica is on the writers, as Orbax records it.

    The arrays of a single writer stay on the whole mesh, with the primary slice moved to its
    front, since Orbax reads no sharding of one process of several; arrays that each process
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
        problem = "it is empty: the persistent tier has no such steps"
        raise InvalidState("save", "the state", problem)
    _check_names(tree)
    for leaf in tree.leaves:
        if leaf.spec.dtype in STORED_AS_UINT8:
            continue
        try:
            tensorstore.dtype(leaf.spec.dtype)
        except ValueError as error:
            problem = f"the persistent tier cannot store dtype {leaf.spec.dtype}"
            hint = "store it as another dtype, or use the local tier only"
            raise InvalidState("save", f"leaf {leaf.spec.path!r}", problem, hint=hint) from error


def _check_names(tree: StateTree) -> None:
    # Without dots in keys, different paths have different names, so Orbax need not be imported.
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
            problem = f"the persistent tier would store both as {name!r}, one over the other"
            hint = "rename a key, or use the local tier only"
            raise InvalidState("save", f"leaves {other!r} and {path!r}", problem, hint=hint)
