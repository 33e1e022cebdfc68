"""Local tiers that a transfer server serves: their saves and shards."""

from __future__ import annotations

import functools

import tiers_support
from transfer_support import RUN_ID, SAVE

from emergency_ckpt.ram import LocalTier
from emergency_ckpt.types import LeafSpec, SaveId, ShardId

open_tier = functools.partial(tiers_support.open_tier, run_id=RUN_ID, process_count=2)


def save_shards(tier: LocalTier, save: SaveId, shards: list[bytes]) -> str:
    """Publish one uint8 leaf per shard; the digest."""
    leaves = [LeafSpec(f"shard/{i:05}", "uint8", (len(data),)) for i, data in enumerate(shards)]
    names = [ShardId(leaf.path, ((0, leaf.global_shape[0]),)) for leaf in leaves]
    return tiers_support.publish(tier, save, leaves, dict(zip(names, shards, strict=True)))


def later(step: int) -> SaveId:
    return SaveId(step, SAVE.incarnation, RUN_ID)
