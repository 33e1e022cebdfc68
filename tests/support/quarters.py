"""A step on ramdisks of which no process has all: one leaf in four boxes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from tiers_support import document, open_tier, save_id

from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.ram import Signer, build_contents
from emergency_ckpt.types import LeafSpec, ShardId

LEAVES = (LeafSpec("w", "bfloat16", (8, 6)), LeafSpec("z", "float32", (0, 2)))
BOXES = [((row, row + 4), (column, column + 3)) for row in (0, 4) for column in (0, 3)]
W = np.arange(48).reshape(8, 6).astype(ml_dtypes.bfloat16)


def save_quarters(
    ramdisk: Path, held: dict[int, list[int]], signer: Signer | None = None, *, step: int = 5
) -> dict[int, Path]:
    """Save one step of ``W``; each process has the quarters that ``held`` names."""
    tiers = {process: open_tier(ramdisk, process_index=process, signer=signer) for process in held}
    for process, tier in tiers.items():
        shards = [(ShardId("w", BOXES[quarter]), 24) for quarter in held[process]]
        layout = lay_out(LEAVES, [*shards, (ShardId("z", ((0, 0), (0, 2))), 0)])
        save = save_id(step)
        with tier.begin_write(save, layout.size_bytes) as writer:
            copies = [
                (W[tuple(slice(*span) for span in placed.shard.box)].tobytes(), placed.offset)
                for placed in layout.shards
                if placed.nbytes
            ]
            crcs = iter(writer.copy(copies))
            all_crcs = [next(crcs) if placed.nbytes else 0 for placed in layout.shards]
            writer.stage(build_contents(save, LEAVES, layout, all_crcs))
            writer.publish()
        for owner in range(4):
            tier.publish_host_state(save, owner, 4, document(step, owner))
    for tier in tiers.values():
        tier.close()
    return {process: tier.path for process, tier in tiers.items()}
