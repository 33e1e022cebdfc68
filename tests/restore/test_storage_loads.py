"""The parts of two processes in bringing a persistent step into RAM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from served_tiers import open_tier
from transfer_support import RUN_ID
from world import World, finish

from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.storage_load import LoadPlan, StorageLoad, plan_load
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

STEP = 2


@pytest.fixture
def persistent(world: World) -> PersistentTier:
    with world.open_both() as checkpointer:
        values = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
        sharding = NamedSharding(world.mesh, P("fsdp"))
        leaves = {f"w{number}": jax.device_put(values + number, sharding) for number in range(4)}
        assert checkpointer.save(step=STEP, state=leaves)
        finish(checkpointer)
    return PersistentTier(str(world.persistent))


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[list[LocalTier]]:
    """The ramdisks of two processes."""
    found = [open_tier(tmp_path / str(number), RUN_ID, number) for number in range(2)]
    yield found
    for tier in found:
        tier.close()


def plan(persistent: PersistentTier) -> LoadPlan:
    """Two processes that need all of the step."""
    stored = persistent.describe(persistent.find(STEP))
    assert stored.marker is not None
    arrays = {path: leaf.array for path, leaf in stored.leaves.items()}
    target = tuple(sorted(shard for shard in stored.crcs if shard.leaf in arrays))
    return plan_load(
        RestorePlan("persistent", STEP, None, {}),
        stored,
        arrays,
        dict.fromkeys(range(2), target),
        {leaf.path: leaf for leaf in stored.marker.leaves},
        RUN_ID,
        wants_host_state=False,
    )


def load(tier: LocalTier, persistent: PersistentTier, wanted: LoadPlan, me: int) -> set[ShardId]:
    """Load the part of process ``me``; the shards that its RAM has then."""
    stored = persistent.describe(persistent.find(STEP))
    assert stored.marker is not None
    StorageLoad(
        tier,
        persistent,
        wanted,
        me=me,
        leaves=stored.marker.leaves,
        progress=WorkProgress.until(time.monotonic() + 60),
        room=RestoreRoom(tier),
    ).run()
    ((tensors,), _, _) = tier.held()
    contents = tier.contents(tensors.digest)
    assert contents is not None
    assert tensors.save == wanted.save
    assert not tier.verify(tensors.digest, range(len(contents.shards)))
    return {contents.shard_id(index) for index in range(len(contents.shards))}


def test_each_byte_is_read_by_one_process(
    persistent: PersistentTier, tiers: list[LocalTier]
) -> None:
    wanted = plan(persistent)
    held = [load(tier, persistent, wanted, me) for me, tier in enumerate(tiers)]
    assert held[0] | held[1] == set(persistent.describe(persistent.find(STEP)).crcs)
    assert not held[0] & held[1]
    assert all(held)


def test_damage_is_found_and_leaves_nothing_published(
    persistent: PersistentTier, tiers: list[LocalTier]
) -> None:
    wanted = plan(persistent)
    item = Path(persistent.describe(persistent.find(STEP)).item)
    for path in item.glob("**/d/*"):
        data = path.read_bytes()
        path.write_bytes(bytes(byte ^ 1 for byte in data))
    for me, tier in enumerate(tiers):
        with pytest.raises(CorruptData):
            load(tier, persistent, wanted, me)
        assert tier.held()[0] == ()
