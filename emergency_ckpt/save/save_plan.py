"""The snapshot of a save: which shards each tier takes. Built once per structure of state."""

from __future__ import annotations

import dataclasses

from emergency_ckpt.cluster.process_placement import ProcessPlacement
from emergency_ckpt.core.save.snapshot_plan import SnapshotSettings
from emergency_ckpt.state.device_copies import DeviceCopies
from emergency_ckpt.state.snapshot import SnapshotRecipe


@dataclasses.dataclass(frozen=True)
class SnapshotPlan:
    """Recipes by which this process takes snapshots of states of one structure.

    Attributes:
      local: takes the stored shards of ``placement``, in the order of its layout.
      all_held: takes all shards that ``placement`` says this process holds.
    """

    placement: ProcessPlacement
    local: SnapshotRecipe
    all_held: SnapshotRecipe


def plan_snapshots(
    placement: ProcessPlacement, settings: SnapshotSettings, copies: DeviceCopies
) -> SnapshotPlan:
    """Return the plan for states placed as ``placement`` says.

    ``copies``: the budget of device memory, for all plans of the process.
    """
    return SnapshotPlan(
        placement,
        local=SnapshotRecipe(placement.tree, placement.stored, settings, copies),
        all_held=SnapshotRecipe(placement.tree, placement.held, settings, copies),
    )
