"""The snapshot of a save: which shards each tier takes. Built once per structure of state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from emergency_ckpt.cluster.process_placement import ProcessPlacement
from emergency_ckpt.core.save.snapshot_plan import SnapshotSettings
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.state.device_copies import DeviceCopies
from emergency_ckpt.state.snapshot import SnapshotRecipe
from emergency_ckpt.state.structure import StateStructure
from emergency_ckpt.state.waiting import Look, no_look
from emergency_ckpt.types import ShardId


@dataclasses.dataclass(frozen=True)
class SnapshotPlan:
    """Recipes by which this process takes snapshots of states of one structure.

    ``structure``: finds the leaves of such states. ``local``: takes the stored shards of
    ``placement``, in the order of its layout. Those of the persistent tier are built when they are
    first needed. ``copies``: see ``plan_snapshots``.
    """

    placement: ProcessPlacement
    structure: StateStructure
    settings: SnapshotSettings
    copies: DeviceCopies
    local: SnapshotRecipe
    look: Look

    @functools.cached_property
    def held(self) -> SnapshotRecipe:
        """Return the recipe of all shards that this process holds."""
        return self._recipe(self.placement.held)

    @functools.cached_property
    def not_stored(self) -> tuple[ShardId, ...]:
        """Return the shards that this process holds and does not keep in RAM."""
        stored = set(self.placement.stored)
        return tuple(shard for shard in self.placement.held if shard not in stored)

    @functools.cached_property
    def rest(self) -> SnapshotRecipe:
        """Return the recipe of the shards ``not_stored``."""
        return self._recipe(self.not_stored)

    @functools.cached_property
    def held_layout(self) -> Layout:
        """Return places for all shards that this process holds."""
        specs = self.placement.tree.specs
        return lay_out(
            self.placement.leaves,
            [(shard, shard_nbytes(specs[shard.leaf], shard.box)) for shard in self.placement.held],
        )

    def _recipe(self, wanted: Sequence[ShardId]) -> SnapshotRecipe:
        return SnapshotRecipe(self.placement.tree, wanted, self.settings, self.copies, self.look)


def plan_snapshots(
    placement: ProcessPlacement,
    settings: SnapshotSettings,
    copies: DeviceCopies,
    look: Look = no_look,
) -> SnapshotPlan:
    """Return the plan for states placed as ``placement`` says.

    ``copies``: the budget of device memory, for all plans of the process. ``look``: see
    ``SnapshotRecipe``.
    """
    local = SnapshotRecipe(placement.tree, placement.stored, settings, copies, look)
    return SnapshotPlan(placement, StateStructure(placement.tree), settings, copies, local, look)
