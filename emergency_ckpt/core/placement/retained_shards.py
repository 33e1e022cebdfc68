"""The shards that a process keeps after a restore, so that it is a holder again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from emergency_ckpt.core.boxes import overlap
from emergency_ckpt.types import Box, ShardId


class RetainedShards:
    """The shards of a restore that a process keeps: those that it stores at a save.

    Args:
      stored: shards that placement gives to the process.
      needed: all shards on its devices.
    """

    def __init__(self, stored: Iterable[ShardId], needed: Iterable[ShardId]) -> None:
        self._stored = frozenset(stored)
        self._needed = frozenset(needed)
        self._boxes: dict[str, list[Box]] = {}
        for shard in self._stored:
            self._boxes.setdefault(shard.leaf, []).append(shard.box)

    def __contains__(self, shard: ShardId) -> bool:
        """Return whether ``shard``, or for another mesh a part of it, is stored here."""
        if shard in self._stored or shard in self._needed:
            return shard in self._stored
        boxes = self._boxes.get(shard.leaf, ())
        return any(overlap(shard.box, box) is not None for box in boxes)
