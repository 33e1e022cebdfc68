"""Which of the shards that a restore brings a process keeps, so that it is a holder again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from emergency_ckpt.core.boxes import overlap
from emergency_ckpt.types import Box, ShardId


class RetainedShards:
    """What a process stores at a save, it keeps at a restore; what else it needs, it only uses.

    Args:
      stored: what placement gives to the process.
      needed: all shards on its devices.
    """

    def __init__(self, stored: Iterable[ShardId], needed: Iterable[ShardId]) -> None:
        self._stored = frozenset(stored)
        self._needed = frozenset(needed)
        self._boxes: dict[str, list[Box]] = {}
        for shard in self._stored:
            self._boxes.setdefault(shard.leaf, []).append(shard.box)

    def __contains__(self, shard: ShardId) -> bool:
        """Whether it is kept. A shard of another mesh: when a part of it is stored here."""
        if shard in self._stored or shard in self._needed:
            return shard in self._stored
        boxes = self._boxes.get(shard.leaf, ())
        return any(overlap(shard.box, box) is not None for box in boxes)
