"""What a process keeps of the shards that a restore brings."""

from __future__ import annotations

from emergency_ckpt.core.placement import RetainedShards
from emergency_ckpt.types import ShardId

STORED, USED = ShardId("w", ((0, 4),)), ShardId("w", ((4, 8),))
KEEPING = RetainedShards([STORED], [STORED, USED])


def test_what_is_stored_is_kept_and_what_is_only_needed_is_not() -> None:
    assert STORED in KEEPING
    assert USED not in KEEPING


def test_shards_of_another_mesh_are_kept_by_holders_of_a_part() -> None:
    assert ShardId("w", ((3, 5),)) in KEEPING
    assert ShardId("w", ((4, 6),)) not in KEEPING
    assert ShardId("v", ((0, 4),)) not in KEEPING
