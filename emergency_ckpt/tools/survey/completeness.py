"""The saves in RAM that a restore would find complete, and what others lack. Pure."""

from __future__ import annotations

import msgspec

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.core.restore.inventory import HolderInventory, Inventory
from emergency_ckpt.core.restore.plan_types import NoPlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.types import SaveId, ShardId


def lacks_of(save: SaveId, inventory: Inventory) -> str:
    """Return what a restore of ``save`` from RAM would lack, in words; empty when it is complete.

    The state is that of the save's own manifests, and a process of any mesh may need all of it, so
    every element of every leaf and every host state must be held. Rolled-back saves are judged like
    others.
    """
    holders = tuple(_parts_of(save, holder) for holder in inventory.holders)
    digests = sorted({manifest.digest for holder in holders for manifest in holder.tensors})
    manifests = [inventory.manifests[d] for d in digests if d in inventory.manifests]
    if not manifests:
        return "no manifest"
    leaves = {leaf.path: leaf for leaf in manifests[0].leaves}
    plan = plan_restore(
        msgspec.structs.replace(inventory, holders=holders, persistent=(), timeline=None),
        {0: tuple(ShardId(leaf.path, whole(leaf.global_shape)) for leaf in leaves.values())},
        leaves,
        requested_step=save.step,
        host_state_remap=True,
    )
    if not isinstance(plan, NoPlan):
        return ""
    reasons = [rejected.reason for rejected in plan.rejected] or list(
        plan.missing + plan.mismatches
    )
    return "; ".join(reasons)


def newest_complete(inventory: Inventory) -> SaveId | None:
    """Return the newest save that is complete and was not rolled back, or None."""
    timeline = inventory.timeline
    saves = {manifest.save for holder in inventory.holders for manifest in holder.tensors}
    for save in sorted(saves, reverse=True):
        rejection_reason = (
            timeline.rejection_reason(save.step, save.incarnation) if timeline else ""
        )
        if not rejection_reason and not lacks_of(save, inventory):
            return save
    return None


def _parts_of(save: SaveId, holder: HolderInventory) -> HolderInventory:
    """Return the part of an inventory that is of one save."""
    return msgspec.structs.replace(
        holder,
        tensors=tuple(manifest for manifest in holder.tensors if manifest.save == save),
        host_states=tuple(
            host_state for host_state in holder.host_states if host_state.save == save
        ),
        known_complete=None,
        timeline=None,
    )
