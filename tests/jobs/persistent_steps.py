"""Whole steps in a directory or bucket, as saves leave them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.state import host_state
from emergency_ckpt.state.snapshot import SnapshotRecipe
from emergency_ckpt.state.tree import BoxTable, describe
from emergency_ckpt.tiers.persistent.marker import NO_SIGNING, OURS
from emergency_ckpt.tiers.persistent.steps.removal import StepRecords
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.types import LeafSpec, SaveId


def fill(
    directory: str,
    steps: Iterable[int],
    *,
    metrics: Callable[[int], Any] | None = None,
    signing: StepSigning = NO_SIGNING,
) -> PersistentTier:
    """A tier with ``steps``, which plain Orbax reads too: ``w`` is the step, four times."""
    tier = PersistentTier(directory, signing=signing)
    tier.create()
    shelf = StepRecords(tier)
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            manager.save(
                step,
                args=ocp.args.StandardSave({"w": np.full(4, step)}),
                custom_metadata={OURS: {}},
            )
    for step in steps:
        tier.write_document(step, 0, 1, b"{}")
        if metrics is not None:
            shelf.write_metrics(step, metrics(step))
        save = SaveId(step, "life", "run")
        tier.publish(save, {0: ("0" * 64, True)}, [LeafSpec("w", "int64", (4,))], {})
    return tier


def save_over(tier: PersistentTier, step: int, value: int, life: str) -> None:
    """One save, as ``save.persistent.save`` does it: over whatever lies there."""
    save, state = SaveId(step, life, "run"), {"w": np.full(4, value)}
    tree = describe(state, "save")
    shards = BoxTable(tree, 1).shards_of(0)
    on_host = SnapshotRecipe(tree, shards).take(jax.tree_util.tree_leaves(state)).collect()
    tier.create()
    tier.remove_leftovers()
    tier.changes.make_room(step, f"saved anew by {life}")
    data = host_state.encode(save, 0, 1, host_state.capture({"at": value}))
    tier.write_document(step, 0, 1, data)
    tier.write_tensors(save, tree, dict(zip(shards, on_host, strict=True)), (0,))
    digest = hashlib.sha256(data).hexdigest()
    tier.publish(save, {0: (digest, False)}, [leaf.spec for leaf in tree.leaves], {})
    tier.changes.end_replacement(step)


def value_of(tier: PersistentTier, step: int) -> int:
    """What ``save_over`` stored, read as a restore does; of plain Orbax, what lies in ``w``."""
    stored = tier.describe(step)
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    tree = describe({"w": np.zeros(4, np.int64)}, "restore")
    shards = BoxTable(tree, 1).shards_of(0)
    ((_, array),) = tier.read_boxes(
        stored.item, arrays, shards, complete=True, deadline_s=time.monotonic() + 60
    )
    (value,) = set(np.asarray(array).reshape(-1).tolist())
    if stored.marker is not None:
        data = tier.read_document(step, 0, 1, stored.marker.digests[0])
        assert host_state.value_of(host_state.decode(data).payload) == {"at": value}
        assert StepRecords(tier).record(step).step == step
    return value
