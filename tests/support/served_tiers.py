"""Local tiers that a transfer server serves: their saves and shards."""

from __future__ import annotations

from pathlib import Path

from transfer_support import RUN_ID, SAVE

from emergency_ckpt.core.shard_layout import lay_out
from emergency_ckpt.ram import LocalTier, Signer, manifest
from emergency_ckpt.types import LeafSpec, SaveId, ShardId, Writer


def open_tier(
    ramdisk: Path,
    run_id: str = RUN_ID,
    process_index: int = 0,
    signer: Signer | None = None,
) -> LocalTier:
    return LocalTier.open(
        ramdisk,
        run_id,
        Writer(process_index, 2, 0, "host"),
        copy_threads=1,
        signer=signer,
    )


def save_shards(tier: LocalTier, save: SaveId, shards: list[bytes]) -> str:
    """Publish one uint8 leaf per shard; the digest."""
    leaves = [LeafSpec(f"shard/{i:05}", "uint8", (len(data),)) for i, data in enumerate(shards)]
    places = [
        (ShardId(leaf.path, ((0, len(data)),)), len(data))
        for leaf, data in zip(leaves, shards, strict=True)
    ]
    layout = lay_out(leaves, places)
    writer = tier.begin_write(save, layout.size_bytes)
    crcs = writer.copy(
        [(data, placed.offset) for data, placed in zip(shards, layout.shards, strict=True)]
    )
    digest = writer.stage(manifest.build_contents(save, leaves, layout, crcs))
    writer.publish()
    return digest


def later(step: int) -> SaveId:
    return SaveId(step, SAVE.incarnation, RUN_ID)
