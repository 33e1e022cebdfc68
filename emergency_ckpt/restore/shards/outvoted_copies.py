"""A process's own copies that a majority of their holders contradicts: never used again."""

from __future__ import annotations

from collections.abc import Mapping

from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.plan_types import few
from emergency_ckpt.events import EventSink
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.types import SaveId, ShardId

_PROBLEM = "most holders have other bytes, and theirs are restored"


def quarantine_outvoted(
    tier: LocalTier,
    events: EventSink,
    save: SaveId,
    holder: str,
    outvoted: Mapping[str, tuple[int, ...]],
) -> None:
    """Mark the copies as damaged, and tell of each manifest once, by ``restore.quarantined``.

    Their bytes fit their CRC, so nothing but this mark keeps them from being used or served until
    the restore has put the majority's in their place and unpublished their slot.
    """
    for digest, shards in outvoted.items():
        contents = tier.contents(digest)
        if contents is None:
            continue  # it is not held any more
        known = tier.quarantined_shards(digest)
        new = [shard for shard in shards if shard not in known]
        for shard in new:
            tier.quarantine(digest, shard, _PROBLEM)
        if new:
            events.emit(
                "restore.quarantined",
                step=save.step,
                holder=holder,
                shard=few(map(_name, map(contents.shard_id, new))),
                detail=_PROBLEM,
            )


def _name(shard: ShardId) -> str:
    return f"{shard.leaf}{describe(shard.box)}"
