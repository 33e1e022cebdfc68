"""The places of a state's shards on one process: computed once, used by saves and restores."""

from __future__ import annotations

import dataclasses

from emergency_ckpt.cluster.topology import topology_of
from emergency_ckpt.config import Config
from emergency_ckpt.core.boxes import covers, whole
from emergency_ckpt.core.placement.placement_policies import (
    AllButPrimary,
    PlacementPolicy,
    SingleCopies,
    Striped,
    Topology,
    buddies,
    place,
    single_copies,
)
from emergency_ckpt.core.placement.retained_shards import RetainedShards
from emergency_ckpt.core.placement.writers import writers
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.tree import BoxTable, StateTree
from emergency_ckpt.storage.writer_arrays import check_storable
from emergency_ckpt.types import LeafSpec, ShardId


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """The places of one process's shards and host state, for states of one structure.

    A save and a restore use the same one: what a save stores, a restore keeps.

    Attributes:
      leaves: of the whole state.
      held: all distinct shards on this process's devices.
      layout: where in a slot the shards go that this process stores.
      retained: what this process keeps in RAM at a restore; None: all that it needs.
      writers: the processes that talk to storage on a persistent save; the first one leads.
      buddies: the processes that get a copy of this process's host state.
      single: what one process of the job alone keeps in RAM.
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
    if isinstance(policy, AllButPrimary):
        return slices if slices <= 2 else slices - 1
    return min(policy.copies, slices)


def place_process(tree: StateTree, config: Config, process: tuple[int, int]) -> ProcessPlacement:
    """Return the placement of ``tree`` on this process. Pure but for the devices' slices.

    ``process``: (index, count).

    Raises:
      InvalidState: with a persistent tier, a leaf that a slice which writes it does not hold
        whole, or of a dtype that this tier cannot store.
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
        every = config.persistent_writers == "striped"
        for index in topology.slices if every else topology.slices[:1]:
            _check_slice_is_whole(tree, table, topology, index)
    held = table.shards_of(me)
    # Fewer copies than slices must not grow to more in a restore; where the primary alone stores
    # nothing, what it has fetched is one copy more.
    retained = None if isinstance(config.placement, AllButPrimary) else RetainedShards(stored, held)
    return ProcessPlacement(
        tree=tree,
        topology=topology,
        leaves=leaves,
        held=held,
        layout=layout,
        retained=retained,
        writers=writers(topology, config.persistent_writers),
        buddies=buddies(me, topology, config.host_state_buddies),
        single=single_copies(config.placement, topology, held_leaves),
    )


def single_copy_text(config: Config, placement: ProcessPlacement) -> str:
    """Return the warning where one host alone has parts of the state in RAM; empty elsewhere."""
    single, slices = placement.single, len(placement.topology.slices)
    if not single.nbytes:
        return ""
    back = f"the newest step in {config.dir}" if config.dir else "the beginning: dir is not set"
    if placement.topology.process_count == 1:
        return (
            "the job is one process, so each part of the state has one copy in RAM, on this host."
            f" The loss of the host costs every step in RAM, and the job goes back to {back}"
        )
    if slices > 1 and isinstance(config.placement, Striped) and config.placement.copies == 1:
        why = "placement keeps one copy"
    elif slices > 1:
        why = f"they are split across the {slices} slices, as in leaf {single.leaf!r}"
    else:
        why = f"the job has one slice: {_why_one_slice(config)}"
    chosen = "" if config.replica_axis is None else "; without replica_axis the best one is chosen"
    part, state = size_text(single.nbytes), size_text(single.total_bytes)
    return (
        f"{part} of the {state} of the state have one copy in RAM, on one host: {why}. The loss of"
        f" a host with such a part costs every step in RAM, and the job goes back to {back}. With"
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


def _check_slice_is_whole(tree: StateTree, table: BoxTable, topology: Topology, index: int) -> None:
    boxes: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for writer in topology.members[index]:
        for shard in table.shards_of(writer):
            boxes.setdefault(shard.leaf, set()).add(shard.box)
    for leaf in tree.leaves:
        if not covers(whole(leaf.spec.global_shape), sorted(boxes.get(leaf.spec.path, ()))):
            raise InvalidState(
                "save",
                f"leaf {leaf.spec.path!r}",
                f"slice {index} does not hold all of it, so it cannot write it",
                hint="set mesh and replica_axis so that slices are replicas",
            )
