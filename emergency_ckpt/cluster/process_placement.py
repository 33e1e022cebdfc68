"""The slices of a job, and the places of a state's shards on one process.

Both are computed once, and are used by saves and restores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from emergency_ckpt.config import Config
from emergency_ckpt.core.boxes import covers, whole
from emergency_ckpt.core.placement import (
    HeldLeaves,
    PlacementPolicy,
    RamWriters,
    RetainedShards,
    SingleCopies,
    Topology,
    buddies,
    place,
    replicated_bytes,
    single_copies,
    writers_from_ram,
)
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.state.tree import BoxTable, StateTree
from emergency_ckpt.storage.writer_arrays import check_storable
from emergency_ckpt.types import LeafSpec, ShardId


def topology_of(
    mesh: jax.sharding.Mesh | None,
    replica_axis: str | int | None,
    tree: StateTree,
    held_leaves: Sequence[HeldLeaves],
    *,
    needs_whole: bool,
) -> Topology:
    """Return the slice of each process. Not collective. ``replica_axis``: see ``Config``.

    The slices follow from the coordinate on ``replica_axis`` of ``mesh``; without a mesh from the
    devices' ``slice_index`` where these differ; else from the mesh of the state's own shardings.
    Without any of these there is one slice. Slices that share a process are merged, because they
    fail together. ConfigError when ``replica_axis`` is no axis of the mesh that was found. Where
    ``replica_axis`` is None, ``replicated_axis`` chooses by ``held_leaves`` and ``needs_whole``.
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
        axis = replicated_axis(mesh, held_leaves, needs_whole=needs_whole)
        return one if axis is None else _along(mesh, axis)
    axes = mesh.axis_names
    if isinstance(replica_axis, str) and replica_axis in axes:
        return _along(mesh, axes.index(replica_axis))
    if isinstance(replica_axis, int) and 0 <= replica_axis < len(axes):
        return _along(mesh, replica_axis)
    problem = f"replica_axis {replica_axis!r} is none of the axes {axes} of the mesh"
    raise ConfigError([f"{problem}; without the setting mesh, it is that of the state's shardings"])


def replicated_axis(
    mesh: jax.sharding.Mesh, held_leaves: Sequence[HeldLeaves], *, needs_whole: bool
) -> int | None:
    """Return the axis of ``mesh`` along which the most bytes are replicated, the first of equals.

    The axis is the same on all processes. Only axes with several slices count: along an axis of
    size 1 (as MaxText's ``diloco``), or inside a host, no other host would have a copy. With
    ``needs_whole`` (a slice must hold the whole state, to write it to storage) an axis counts only
    if all of the state is replicated along it. None where no axis counts.
    """
    chosen, most = None, 0
    for axis in range(mesh.devices.ndim):
        topology = _along(mesh, axis)
        if len(topology.slices) == 1:
            continue
        replicated, total = replicated_bytes(topology, held_leaves)
        if replicated > most and (replicated == total or not needs_whole):
            chosen, most = axis, replicated
    return chosen


def _along(mesh: jax.sharding.Mesh, axis: int) -> Topology:
    pairs = {
        (device.process_index, coordinate[axis])
        for coordinate, device in np.ndenumerate(mesh.devices)
    }
    return _merged(pairs, jax.process_count())


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


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """The places of one process's shards and host state, for states of one structure.

    A save and a restore use the same placement: a restore keeps the shards that a save stores.

    Attributes:
      leaves: of the whole state.
      held: all distinct shards on this process's devices.
      layout: the places in a slot of the shards that this process stores.
      retained: the shards that this process keeps in RAM at a restore; None: all that it needs.
      writers: the processes that write to storage on a persistent save; the first writer leads.
      buddies: the processes that get a copy of this process's host state.
      single: the bytes of which only one process of the job keeps a copy in RAM.
    """

    tree: StateTree
    topology: Topology
    leaves: tuple[LeafSpec, ...]
    held: tuple[ShardId, ...]
    layout: Layout
    retained: RetainedShards | None
    writers: tuple[int, ...]
    buddies: tuple[int, ...]
    single: SingleCopies

    @property
    def stored(self) -> tuple[ShardId, ...]:
        """Return the shards that this process stores, in the order of ``layout``."""
        return tuple(placed.shard for placed in self.layout.shards)


def copies_in_ram(policy: PlacementPolicy, topology: Topology) -> int:
    """Return the number of slices that keep each shard in RAM."""
    slices = len(topology.slices)
    if policy.copies is None:
        return slices if slices <= 2 else slices - 1
    return min(policy.copies, slices)


def place_process(tree: StateTree, config: Config, process: tuple[int, int]) -> ProcessPlacement:
    """Return the placement of ``tree`` on this process. Pure, except for the devices' slices.

    ``process``: (index, count).

    Raises:
      InvalidState: with a persistent tier, a leaf of a dtype that this tier cannot store.
      ConfigError: with a persistent tier, a leaf of which the slice that writes to storage lacks a
        part.
    """
    me, count = process
    table = BoxTable(tree, count)
    held_leaves = table.held_leaves()
    topology = topology_of(
        config.mesh,
        config.replica_axis,
        tree,
        held_leaves,
        needs_whole=config.dir is not None,
    )
    stored = place(config.placement, topology, me, held_leaves)
    specs = tree.specs
    leaves = tuple(leaf.spec for leaf in tree.leaves)
    layout = lay_out(
        leaves, [(shard, shard_nbytes(specs[shard.leaf], shard.box)) for shard in stored]
    )
    if config.dir is not None:
        check_storable(tree)
        _check_writers_hold_all(tree, table, topology, config)
    shards = table.shards_of(me)
    # With fewer copies than slices, a restore must not add copies. Where only the primary slice
    # stores nothing, it still keeps what it has fetched, as one copy more.
    retained = None if config.placement.copies is None else RetainedShards(stored, shards)
    return ProcessPlacement(
        tree=tree,
        topology=topology,
        leaves=leaves,
        held=shards,
        layout=layout,
        retained=retained,
        writers=topology.writers,
        buddies=buddies(me, topology),
        single=single_copies(config.placement, topology, held_leaves),
    )


def ram_writers(config: Config, placement: ProcessPlacement) -> RamWriters:
    """Return which processes can write a step of this structure to storage from RAM. Pure."""
    topology = placement.topology
    held_leaves = BoxTable(placement.tree, topology.process_count).held_leaves()
    return writers_from_ram(config.placement, topology, held_leaves)


def single_copy_text(config: Config, placement: ProcessPlacement) -> str:
    """Return the warning where one host alone has parts of the state, or a host state, in RAM.

    Empty otherwise. A restore passes over a step that lacks a host state, as over a step that lacks
    tensors.
    """
    single, slices = placement.single, len(placement.topology.slices)
    is_alone = placement.topology.process_count > 1 and not placement.buddies
    if not single.nbytes and not is_alone:
        return ""
    # A face may have given storage to an object of Orbax's.
    back = f"the job goes back to the newest step in {config.dir}"
    if config.dir is None:
        back = "this checkpointer has no other, since dir is not set"
    if placement.topology.process_count == 1:
        return (
            "the job is one process, so each part of the state has one copy in RAM, on this host."
            f" The loss of the host costs every step in RAM, and {back}"
        )
    if slices > 1 and config.placement.copies == 1:
        why = "placement keeps one copy"
    elif slices > 1:
        why = f"they are split across the {slices} slices, as in leaf {single.leaf!r}"
    else:
        why = f"the job has one slice: {_why_one_slice(config)}"
    chosen = "" if config.replica_axis is None else "; without replica_axis the best one is chosen"
    if not single.nbytes:
        return (
            "each process's host state has one copy in RAM, on its own host, though tensors have"
            f" more: {why}. The loss of a host costs every step in RAM, and {back}. With an axis"
            f" over several hosts as replica_axis, others keep copies{chosen}"
        )
    part, state = size_text(single.nbytes), size_text(single.total_bytes)
    return (
        f"{part} of the {state} of the state have one copy in RAM, on one host: {why}. The loss of"
        f" a host with such a part costs every step in RAM, and {back}. With"
        " an axis of the mesh over several hosts that the state is not split on, such as data"
        f" parallelism, each part has a second copy{chosen}"
    )


def _why_one_slice(config: Config) -> str:
    if config.mesh is None:
        return (
            "no mesh is set, and that of the state has no axis over hosts that it is not split on"
        )
    axes = {str(name): size for name, size in config.mesh.shape.items()}
    name = config.replica_axis
    if name is None:
        return f"the state is split along each axis of {axes} over several hosts"
    name = list(axes)[name] if isinstance(name, int) else name
    if axes[name] == 1:
        return f"axis {name!r} (replica_axis) of {axes} has size 1"
    return f"each process has devices at several places along {name!r} (replica_axis) of {axes}"


def _check_writers_hold_all(
    tree: StateTree, table: BoxTable, topology: Topology, config: Config
) -> None:
    """Raise ConfigError for a leaf of which the writers of storage, one slice, lack a part.

    The configuration is at fault, so no restart helps, and a launcher must not try a restart.
    """
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for writer in topology.writers:
        for shard in table.shards_of(writer):
            boxes.setdefault(shard.leaf, set()).add(shard.box)
    for leaf in tree.leaves:
        if not covers(whole(leaf.spec.global_shape), sorted(boxes.get(leaf.spec.path, ()))):
            raise ConfigError([_split_leaf_text(leaf.spec.path, topology.slices[0], config)])


def _split_leaf_text(path: str, index: int, config: Config) -> str:
    lack = f"slice {index} has only a part of the leaf, and cannot write the step to {config.dir}"
    if config.replica_axis is None:
        mend = "set mesh and replica_axis to an axis along which no leaf is split"
        return f"leaf {path!r} is split across the slices of the devices: {lack}; {mend}"
    axis = config.replica_axis
    if config.mesh is not None and isinstance(axis, int):
        axis = str(config.mesh.axis_names[axis])
    return (
        f"leaf {path!r} is split along replica_axis {axis!r}: {lack}; set replica_axis to an axis"
        " along which no leaf is split, leave out replica_axis, so that such an axis is chosen, or"
        f" shard the leaf along other axes than {axis!r}"
    )
