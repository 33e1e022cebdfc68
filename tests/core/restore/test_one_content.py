"""Replicas that differ: all processes take the same one of them, by a rule without a clock."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from planner_world import Layout, PlannerWorld, contents_of, with_sets
from process_parts import Part, parts_of

from emergency_ckpt.core.restore.inventory import (
    HeldTensors,
    HolderInventory,
    Inventory,
    Quarantined,
)
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.types import SaveId, ShardId

W = ShardId("w", ((0, 8), (0, 2)))
GOOD, BAD = 0, 0xBAD


def job(slices: int, hosts: int = 1, copies: int | None = None) -> tuple[PlannerWorld, SaveId]:
    world = PlannerWorld(Layout(slices, hosts, placement=Striped(copies or slices, 0)))
    return world, world.save(10, "a", complete=True)


def alter(world: PlannerWorld, process: int, leaf: str = "w", crc: int = BAD) -> Quarantined:
    """The process's manifest says another CRC for its shard of ``leaf``; which copy that is."""
    machine = world.machine(process)
    held = machine.tensors[-1]
    contents = world.manifests[held.digest]
    index = next(n for n in range(len(contents.shards)) if contents.shard_id(n).leaf == leaf)
    shards = list(contents.shards)
    shards[index] = msgspec.structs.replace(shards[index], crc32c=crc)
    digest = world.publish(msgspec.structs.replace(contents, shards=tuple(shards)))
    machine.tensors[-1] = HeldTensors(held.save, digest)
    return Quarantined(f"process/{process}", digest, index)


def planned(world: PlannerWorld, inventory: Inventory) -> dict[int, Part]:
    targets = world.layout.targets()
    leaves = world.layout.leaves()
    plan = plan_restore(inventory, targets, leaves)
    assert isinstance(plan, RestorePlan)
    reported = with_sets(inventory, targets, leaves)
    assert plan_restore(reported, targets, leaves) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RestorePlan) == plan
    return parts_of(plan, inventory, targets)


def crcs_used(parts: dict[int, Part], inventory: Inventory, shard: ShardId) -> set[tuple[str, int]]:
    """(holder, CRC) of every copy that some process reads or fetches, alternates included."""
    found: set[tuple[str, int]] = set()
    for process, part in parts.items():
        reads = [(g.digest, g.shards, (f"process/{process}", *g.alternates)) for g in part.local]
        reads += [(g.digest, g.shards, g.sources) for g in part.fetch]
        for digest, shards, holders in reads:
            contents = inventory.manifests[digest]
            for index in shards:
                if contents.shard_id(index) == shard:
                    found |= {(holder, contents.shards[index].crc32c) for holder in holders}
    return found


@pytest.mark.parametrize(("slices", "altered"), [(3, [1]), (4, [0]), (5, [1, 3])])
def test_content_that_the_fewest_must_fetch_is_taken(slices: int, altered: list[int]) -> None:
    """The number of holders breaks a tie: only holders of the other content fetch the shard."""
    world, _ = job(slices)
    for process in altered:
        alter(world, process)
    inventory = world.inventory()
    parts = planned(world, inventory)
    assert {crc for _, crc in crcs_used(parts, inventory, W)} == {GOOD}
    assert [process for process, part in parts.items() if part.fetch] == altered


@pytest.mark.parametrize("altered", [0, 1])
def test_one_of_two_copies_is_taken_by_both(altered: int) -> None:
    """Nobody knows which is right: the smaller digest decides, and the replicas stay together."""
    world, _ = job(2)
    alter(world, altered)
    inventory = world.inventory()
    used = crcs_used(planned(world, inventory), inventory, W)
    assert len({crc for _, crc in used}) == 1
    (holder,) = {holder for holder, _ in used}
    digests = {f"process/{p}": world.machine(p).tensors[-1].digest for p in (0, 1)}
    assert digests[holder] == min(digests.values())


def test_whole_replica_is_taken_and_not_leaves_of_two() -> None:
    """Every leaf differs: what was trained apart is not put together."""
    world, _ = job(2)
    leaves = {contents_id.leaf for contents_id in world.layout.targets()[0]}
    for leaf in leaves:
        alter(world, 1, leaf)
    inventory = world.inventory()
    parts = planned(world, inventory)
    holders = {
        holder
        for shard in world.layout.targets()[0]
        for holder, _ in crcs_used(parts, inventory, shard)
    }
    assert len(holders) == 1


def test_intact_replica_goes_before_one_that_most_have_damaged() -> None:
    world, _ = job(3)
    copy = alter(world, 1)
    for process in (0, 2):
        digest = world.machine(process).tensors[-1].digest
        world.quarantined.add(Quarantined(f"process/{process}", digest, copy.shard))
    inventory = world.inventory()
    assert crcs_used(planned(world, inventory), inventory, W) == {("process/1", BAD)}


def test_no_replica_that_is_whole_is_no_reason_to_mix() -> None:
    world, _ = job(2)
    copy = alter(world, 0)
    other = world.machine(1).tensors[-1].digest
    for holder, digest in (("process/0", copy.digest), ("process/1", other)):
        shard = copy.shard if digest == min(copy.digest, other) else 1 - (copy.shard or 0)
        world.quarantined.add(Quarantined(holder, digest, shard))
    outcome = plan_restore(world.inventory(), world.layout.targets(), world.layout.leaves())
    assert isinstance(outcome, NoPlan)
    assert any("copies differ" in line for line in outcome.missing)


def test_copy_with_a_leaf_that_it_lacks_is_compared() -> None:
    """A list of contents is the word of a peer."""
    world, _ = job(3)
    alter(world, 1)
    machine = world.machine(2)
    held = machine.tensors[-1]
    contents = world.manifests[held.digest]
    odd = msgspec.structs.replace(contents.shards[0], leaf=len(contents.leaves))
    digest = world.publish(msgspec.structs.replace(contents, shards=(*contents.shards, odd)))
    machine.tensors[-1] = HeldTensors(held.save, digest)
    inventory = world.inventory()
    used = crcs_used(planned(world, inventory), inventory, W)
    assert len({crc for _, crc in used}) == 1


def test_plan_replaces_the_survivors_own_copy_that_is_not_taken() -> None:
    world, _ = job(3)
    copy = alter(world, 1)
    part = planned(world, world.inventory())[1]
    assert [(g.digest, g.shards) for g in part.fetch] == [
        (world.machine(0).tensors[-1].digest, (copy.shard,))
    ]
    assert [read.shards for read in part.local] == [(0,)]


@pytest.mark.dear
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_plan_takes_one_content_of_each_shard(data: st.DataObject) -> None:
    slices, hosts = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 2))
    copies = data.draw(st.integers(2, slices))
    world, save = job(slices, hosts, copies)
    for process in data.draw(st.lists(st.integers(0, slices * hosts - 1), max_size=2)):
        world.lose(process)
    inventory = world.inventory()
    holders: dict[ShardId, list[HolderInventory]] = {}
    for holder in inventory.holders:
        for held in holder.tensors:
            contents = inventory.manifests[held.digest]
            for index in range(len(contents.shards)):
                holders.setdefault(contents.shard_id(index), []).append(holder)
    if not holders:
        return
    for shard in data.draw(st.lists(st.sampled_from(sorted(holders)), max_size=2, unique=True)):
        indices = [int(holder.holder.removeprefix("process/")) for holder in holders[shard]]
        for process in data.draw(st.lists(st.sampled_from(indices), unique=True)):
            alter(world, process, shard.leaf, data.draw(st.sampled_from([BAD, BAD + 1])))
    inventory = world.inventory()
    targets, leaves = world.layout.targets(), world.layout.leaves()
    outcome = plan_restore(inventory, targets, leaves, needs_host_state=False)
    order = random.Random(data.draw(st.integers()))
    shuffled = msgspec.structs.replace(
        inventory, holders=tuple(order.sample(inventory.holders, len(inventory.holders)))
    )
    assert plan_restore(shuffled, targets, leaves, needs_host_state=False) == outcome
    reported = with_sets(inventory, targets, leaves)
    unread = msgspec.structs.replace(reported, manifests={})
    plans = [
        plan
        for plan in (
            outcome,
            plan_restore(reported, targets, leaves, needs_host_state=False),
            plan_restore(unread, targets, leaves, needs_host_state=False),
        )
        if isinstance(plan, RestorePlan) and plan.save == save
    ]
    event(f"{len(plans)} plans")
    for plan in plans:
        parts = parts_of(plan, inventory, targets)
        for shard in holders:
            assert len({crc for _, crc in crcs_used(parts, inventory, shard)}) <= 1


def test_leaf_that_differs_inside_a_slice_has_one_content() -> None:
    """Each host's own set of shards has one content; the set that they share has two."""
    world = PlannerWorld(Layout(2, 2))
    save = world.save(10, "a", complete=True)
    alter(world, 3, "b")
    targets, leaves = world.layout.targets(), world.layout.leaves()
    reported = with_sets(world.inventory(), targets, leaves)
    unread = msgspec.structs.replace(reported, manifests={})
    assert isinstance(plan_restore(unread, targets, leaves), NoPlan)
    plan = plan_restore(reported, targets, leaves)
    assert isinstance(plan, RestorePlan)
    assert plan.save == save
    used = crcs_used(parts_of(plan, reported, targets), reported, ShardId("b", ((0, 3),)))
    assert len({crc for _, crc in used}) == 1


def changed(what: str, world: PlannerWorld) -> None:
    """Let process 1 hold what its replicas do not."""
    held = world.machine(1).tensors[-1]
    contents = world.manifests[held.digest]
    fewer = world.publish(msgspec.structs.replace(contents, shards=contents.shards[1:]))
    if what == "a shard is damaged":
        world.quarantined.add(Quarantined("process/1", held.digest, 0))
    elif what == "a part":
        world.machine(1).tensors[-1] = HeldTensors(held.save, fewer)
    elif what == "a part beside the whole":
        world.machine(1).tensors.append(HeldTensors(held.save, fewer))
    else:
        odd = msgspec.structs.replace(contents.shards[0], box=((1, 2), (0, 2)))
        digest = world.publish(msgspec.structs.replace(contents, shards=(odd,)))
        world.machine(1).tensors[-1] = HeldTensors(held.save, digest)


@pytest.mark.parametrize(
    "what", ["a shard is damaged", "a part", "a part beside the whole", "boxes of another mesh"]
)
def test_manifest_that_no_process_needs_as_it_is_must_be_read(what: str) -> None:
    """Else its holder would fetch what it has, and the others would not know of a source."""
    world, _ = job(3)
    changed(what, world)
    targets, leaves = world.layout.targets(), world.layout.leaves()
    reported = with_sets(world.inventory(), targets, leaves)
    unread = msgspec.structs.replace(reported, manifests={})
    assert not isinstance(plan_restore(unread, targets, leaves), RestorePlan)
    assert plan_restore(reported, targets, leaves) == plan_restore(
        world.inventory(), targets, leaves
    )


def test_manifest_that_is_quarantined_as_a_whole_is_no_copy() -> None:
    world, _ = job(2)
    targets, leaves = world.layout.targets(), world.layout.leaves()
    digest = world.machine(1).tensors[-1].digest
    world.quarantined.add(Quarantined("process/1", digest))
    unread = msgspec.structs.replace(with_sets(world.inventory(), targets, leaves), manifests={})
    plan = plan_restore(unread, targets, leaves)
    assert isinstance(plan, RestorePlan)
    sources = {copies.bundles[0].sources[0].holders for copies in plan.copies.values()}
    assert sources == {("process/0",)}
    assert plan.copies[1].own == ()


def test_empty_manifest_of_other_leaves_is_no_copy_of_nothing() -> None:
    """No report shows the leaves of a manifest without shards."""
    world = PlannerWorld(Layout(1, 1))
    save = SaveId(10, "a", "run")
    held = HeldTensors(save, world.publish(contents_of(save, world.layout.leaves(), ())))
    world.machine(0).tensors.append(held)
    inventory = with_sets(world.inventory(), {0: ()}, {})
    assert inventory.holders[0].sets == {held.digest: {}}
    outcome = plan_restore(inventory, {0: ()}, {}, needs_host_state=False)
    assert not isinstance(outcome, RestorePlan)


def test_places_follow_the_processes() -> None:
    """A plan does not depend on the order of a set, which Python draws for each program."""
    world = PlannerWorld(Layout(2, 7, rows=14))
    world.save(10, "a", complete=True)
    targets, leaves = world.layout.targets(), world.layout.leaves()
    unread = msgspec.structs.replace(with_sets(world.inventory(), targets, leaves), manifests={})
    plan = plan_restore(unread, targets, leaves)
    assert isinstance(plan, RestorePlan)
    assert [plan.copies[process].place for process in range(14)] == [*range(7), *range(1, 8)]
