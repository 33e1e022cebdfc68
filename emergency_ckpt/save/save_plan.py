"""What a save of one structure of state consists of: worked out once, used for every save."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax

from emergency_ckpt.cluster.topology import topology_of
from emergency_ckpt.core.boxes import covers, whole
from emergency_ckpt.core.placement.policies import (
    AllButPrimary,
    PlacementPolicy,
    Topology,
    buddies,
    place,
)
from emergency_ckpt.core.placement.retained_shards import RetainedShards
from emergency_ckpt.core.placement.writers import PersistentWriters, writers
from emergency_ckpt.core.save.snapshot_plan import SnapshotSettings
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state.device_copies import DeviceCopies
from emergency_ckpt.state.snapshot import SnapshotRecipe
from emergency_ckpt.state.tree import BoxTable, StateTree
from emergency_ckpt.tiers.persistent.writer_arrays import check_storable
from emergency_ckpt.types import LeafSpec, ShardId


class Settings(Protocol):
    """The part of the config that decides what is saved."""

    @property
    def dir(self) -> str | None: ...
    @property
    def mesh(self) -> jax.sharding.Mesh | None: ...
    @property
    def replica_axis(self) -> str | int | None: ...
    @property
    def placement(self) -> PlacementPolicy: ...
    @property
    def persistent_writers(self) -> PersistentWriters: ...
    @property
    def host_state_buddies(self) -> int | None: ...
    @property
    def snapshots(self) -> SnapshotSettings: ...


@dataclasses.dataclass(frozen=True)
class SaveRecipe:
    """How this process saves states of one structure.

    Attributes:
      layout: where in a slot the stored shards go.
      local: takes the shards of ``layout``, in its order.
      held: all distinct shards on this process's devices; ``all_held`` takes them.
      writers: who talks to storage on a persistent save; the first one leads.
      buddies: who gets a copy of this process's host state.
      keeping: what this process keeps in RAM at a restore; None: all that it needs.
    """

    tree: StateTree
    topology: Topology
    leaves: tuple[LeafSpec, ...]
    layout: Layout
    local: SnapshotRecipe
    held: tuple[ShardId, ...]
    all_held: SnapshotRecipe
    writers: tuple[int, ...]
    buddies: tuple[int, ...]
    retained: RetainedShards | None


def copies_in_ram(policy: PlacementPolicy, topology: Topology) -> int:
    """How many slices keep each shard in RAM."""
    slices = len(topology.slices)
    if isinstance(policy, AllButPrimary):
        return slices if slices <= 2 else slices - 1
    return min(policy.copies, slices)


def build_recipe(
    tree: StateTree,
    settings: Settings,
    process: tuple[int, int],
    copies: DeviceCopies | None = None,
) -> SaveRecipe:
    """Work out the recipe for ``tree`` on this process.

    ``copies``: the budget of device memory, for all recipes of the process.

    Raises:
      InvalidState: with a persistent tier, a leaf that a slice which writes it does not hold
        whole, or of a dtype that this tier cannot store.
    """
    me, count = process
    topology = topology_of(settings.mesh, settings.replica_axis, tree)
    table = BoxTable(tree, count)
    stored = place(settings.placement, topology, me, table.held_leaves())
    specs = tree.specs
    layout = lay_out(
        [leaf.spec for leaf in tree.leaves],
        [(shard, shard_nbytes(specs[shard.leaf], shard.box)) for shard in stored],
    )
    if settings.dir is not None:
        check_storable(tree)
        every = settings.persistent_writers == "striped"
        for index in topology.slices if every else topology.slices[:1]:
            _check_slice_is_whole(tree, table, topology, index)
    held = table.shards_of(me)
    # Fewer copies than slices must not grow to more in a restore; where the primary alone stores
    # nothing, what it has fetched is one copy more.
    retained = (
        None if isinstance(settings.placement, AllButPrimary) else RetainedShards(stored, held)
    )
    snapshots = settings.snapshots
    copies = copies or DeviceCopies(snapshots.device_copy_bytes)
    return SaveRecipe(
        tree=tree,
        topology=topology,
        leaves=tuple(leaf.spec for leaf in tree.leaves),
        layout=layout,
        local=SnapshotRecipe(tree, [placed.shard for placed in layout.shards], snapshots, copies),
        held=held,
        all_held=SnapshotRecipe(tree, held, snapshots, copies),
        writers=writers(topology, settings.persistent_writers),
        buddies=buddies(me, topology, settings.host_state_buddies),
        retained=retained,
    )


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
