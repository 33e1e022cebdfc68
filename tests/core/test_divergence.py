"""Replicas that should be equal and are not."""

from __future__ import annotations

import msgspec
from planner_world import Layout, World, contents_of

from emergency_ckpt.core.divergence import divergence_in, find_divergence
from emergency_ckpt.types import Contents, SaveId, ShardId

LAYOUT = Layout(2, 1)
SAVE = SaveId(7, "a", "run")


def contents(crc: int, save: SaveId = SAVE) -> Contents:
    return contents_of(save, LAYOUT.leaves(), LAYOUT.shards(0), crc)


def with_crc(base: Contents, shard: int, crc: int) -> Contents:
    shards = list(base.shards)
    shards[shard] = msgspec.structs.replace(shards[shard], crc32c=crc)
    return msgspec.structs.replace(base, shards=tuple(shards))


def test_equal_replicas_do_not_diverge() -> None:
    assert find_divergence(SAVE, {"process/0": (contents(1),), "process/1": (contents(1),)}) == []


def test_divergence_names_shard_step_and_holders_most_first() -> None:
    good = contents(1)
    held = {"process/0": (with_crc(good, 1, 9),), "process/1": (good,), "process/2": (good,)}
    (found,) = find_divergence(SAVE, held)
    assert found.shard == ShardId("w", ((0, 8), (0, 2)))
    assert found.copies == ((1, ("process/1", "process/2")), (9, ("process/0",)))
    assert found.describe() == (
        "step 7: copies of w[0:8, 0:2] differ: "
        "00000001 at process/1, process/2; 00000009 at process/0"
    )


def test_other_saves_are_not_compared() -> None:
    later = contents(2, SaveId(8, "a", "run"))
    assert find_divergence(SAVE, {"process/0": (contents(1),), "process/1": (later,)}) == []


def test_divergence_in_an_inventory() -> None:
    world = World(LAYOUT)
    save = world.save(7, "a")
    assert divergence_in(world.inventory(), save) == []
    held = world.machines[1].tensors[0]
    world.manifests["bad"] = with_crc(world.manifests[held.digest], 0, 5)
    world.machines[1].tensors[0] = msgspec.structs.replace(held, digest="bad")
    (found,) = divergence_in(world.inventory(), save)
    assert found.copies == ((0, ("process/0",)), (5, ("process/1",)))
