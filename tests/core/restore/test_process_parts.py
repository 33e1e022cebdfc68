"""Each process chooses among the copies that all with equal needs are told of."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from planner_world import Layout, PlannerWorld, contents_of
from process_parts import parts_of

from emergency_ckpt.core.restore.inventory import HeldTensors, Quarantined
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.extras.striped import Striped

MOST_NAMED = 8


def chosen(world: PlannerWorld) -> RestorePlan:
    plan = plan_restore(world.inventory(), world.layout.targets(), world.layout.leaves())
    assert isinstance(plan, RestorePlan), plan
    return plan


def test_processes_with_equal_needs_are_told_the_same() -> None:
    world = PlannerWorld(Layout(4, 2))
    world.save(40, "a", complete=True)
    world.lose(2)
    copies = chosen(world).copies
    assert {len({copies[p].bundles for p in range(position, 8, 2)}) for position in (0, 1)} == {1}
    assert copies[2].bundles[0].sources[0].holders == ("process/4", "process/6")


@pytest.mark.parametrize("seed", range(4))
def test_load_of_many_holders_is_even_though_few_are_named(seed: int) -> None:
    """Half of forty replicas are lost, and no process is told of more than a few of the others."""
    world = PlannerWorld(Layout(40, 1, rows=40, sharded=tuple(f"w{n:02}" for n in range(32))))
    world.save(40, "a", complete=True)
    lost = random.Random(seed).sample(range(1, 40), 20)
    for process in lost:
        world.lose(process)
    plan, inventory = chosen(world), world.inventory()
    sent: Counter[str] = Counter()
    for process, part in parts_of(plan, inventory, world.layout.targets()).items():
        (bundle,) = plan.copies[process].bundles
        assert len(bundle.sources[0].holders) <= MOST_NAMED
        assert bool(part.fetch) == (process in (0, *lost))
        sent.update(group.sources[0] for group in part.fetch for _ in group.shards)
    assert max(sent.values()) <= 2 * sent.total() / len(set(range(1, 40)).difference(lost))


def test_few_of_many_manifests_with_a_leaf_are_named() -> None:
    """Every manifest of the job has the leaf that is replicated inside a slice."""
    world = PlannerWorld(Layout(1, 20, rows=60))
    world.save(40, "a", complete=True)
    world.restart(Layout(1, 30, rows=60))
    plan = plan_restore(
        world.inventory(), world.layout.targets(), world.layout.leaves(), needs_host_state=False
    )
    assert isinstance(plan, RestorePlan), plan
    bundles = [bundle for copies in plan.copies.values() for bundle in copies.bundles]
    assert max(len(bundle.sources) for bundle in bundles) == MOST_NAMED
    parts = parts_of(plan, world.inventory(), world.layout.targets())
    assert max(len({group.digest for group in part.fetch}) for part in parts.values()) == 2


def test_own_copy_that_was_ruled_out_is_not_read() -> None:
    """A peer found the manifest damaged: nobody compared its content with that of the others."""
    world = PlannerWorld(Layout(3, 1, placement=Striped(3, 0)))
    save = world.save(40, "a", complete=True)
    shards = world.layout.stored(1)
    digest = world.publish(contents_of(save, world.layout.leaves(), shards, crc=7))
    world.machine(1).tensors[-1] = HeldTensors(save, digest)
    world.quarantined.add(Quarantined("process/1", digest))
    part = parts_of(chosen(world), world.inventory(), world.layout.targets())[1]
    assert part.local == ()
    assert {group.digest for group in part.fetch} == {world.machine(0).tensors[-1].digest}
