"""A step on ramdisks of which no process has all: one leaf in four boxes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from tiers_support import document, open_tier, publish, save_id

from emergency_ckpt.types import LeafSpec, ShardId

LEAVES = (LeafSpec("w", "bfloat16", (8, 6)), LeafSpec("z", "float32", (0, 2)))
BOXES = [((row, row + 4), (column, column + 3)) for row in (0, 4) for column in (0, 3)]
W = np.arange(48).reshape(8, 6).astype(ml_dtypes.bfloat16)


def save_quarters(ramdisk: Path, held: dict[int, list[int]], *, step: int = 5) -> dict[int, Path]:
    """Save one step of ``W``; each process has the quarters that ``held`` names."""
    tiers = {process: open_tier(ramdisk, process_index=process) for process in held}
    for process, tier in tiers.items():
        boxes = [BOXES[quarter] for quarter in held[process]]
        shards = {ShardId("w", box): W[tuple(slice(*span) for span in box)] for box in boxes}
        shards[ShardId("z", ((0, 0), (0, 2)))] = np.zeros((0, 2), np.float32)
        save = save_id(step)
        publish(tier, save, LEAVES, shards)
        for owner in range(4):
            tier.publish_host_state(save, owner, 4, document(step, owner))
    for tier in tiers.values():
        tier.close()
    return {process: tier.path for process, tier in tiers.items()}
