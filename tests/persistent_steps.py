"""Whole steps in a directory or bucket, as saves leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from emergency_ckpt.core.step_signature import StepSigning
from emergency_ckpt.tiers.orbax_writing import OURS
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.persistent_marker import NO_SIGNING
from emergency_ckpt.tiers.removal import StepShelf
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
    shelf = StepShelf(tier)
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
