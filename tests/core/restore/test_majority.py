"""Replicas that differ: a majority of the holders decides, one half of them decides nothing."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from planner_world import Layout, PlannerWorld

from emergency_ckpt.core.restore.inventory import (
    HeldTensors,
    HolderInventory,
    Inventory,
    Quarantined,
)
from emergency_ckpt.core.restore.majority import STORAGE_VOTE, MajorityResult, name_outvoted, settle
from emergency_ckpt.core.restore.plan_types import ProcessPlan, RestorePlan, selected
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


def planned(world: PlannerWorld, inventory: Inventory) -> RestorePlan:
    plan = plan_restore(inventory, world.layout.targets(), world.layout.leaves())
    assert isinstance(plan, RestorePlan)
    return plan


def without(inventory: Inventory, majority_result: MajorityResult) -> Inventory:
    return msgspec.structs.replace(
        inventory, quarantined=inventory.quarantined | majority_result.outvoted
    )


def crcs_used(plan: RestorePlan, inventory: Inventory, shard: ShardId) -> set[tuple[str, int]]:
    """(holder, CRC) of every copy that some process reads or fetches, alternates included."""
    found: set[tuple[str, int]] = set()
    for process, part in plan.processes.items():
        reads = [(g.digest, g.shards, (f"process/{process}", *g.alternates)) for g in part.local]
        reads += [(g.digest, g.shards, g.sources) for g in part.fetch]
        for digest, shards, holders in reads:
            contents = inventory.manifests[digest]
            for index in selected(shards, contents):
                if contents.shard_id(index) == shard:
                    found |= {(holder, contents.shards[index].crc32c) for holder in holders}
    return found


def test_settle_equal_replicas_rules_nothing() -> None:
    world, save = job(3)
    assert settle(world.inventory(), save) == MajorityResult()


def test_settle_one_of_three_altered_is_outvoted() -> None:
    world, save = job(3)
    copy = alter(world, 1)
    majority_result = settle(world.inventory(), save)
    assert majority_result.outvoted == {copy}
    assert not majority_result.undecided
    (decided,) = majority_result.decided
    assert decided.describe() == (
        "step 10: copies of w[0:8, 0:2] differ: 00000000 at process/0, process/2;"
        " 00000bad at process/1; 00000000, the majority's (2 of 3), is restored"
    )


@pytest.mark.parametrize(("slices", "altered"), [(2, [1]), (4, [0, 3]), (3, [0, 1])])
def test_settle_without_majority_names_the_holders(slices: int, altered: list[int]) -> None:
    world, save = job(slices)
    for process in altered:
        alter(world, process, crc=BAD + process)
    majority_result = settle(world.inventory(), save)
    assert not majority_result.outvoted
    assert not majority_result.decided
    (tie,) = majority_result.undecided
    assert tie.shard == W
    assert {name for _, names in tie.copies for name in names} == {
        f"process/{process}" for process in range(slices)
    }


def test_settle_tie_is_decided_by_stored_crcs() -> None:
    world, save = job(2)
    copy = alter(world, 0)
    majority_result = settle(world.inventory(), save, {W: GOOD})
    assert majority_result.outvoted == {copy}
    assert majority_result.decided[0].divergence.copies[0] == (GOOD, ("process/1", STORAGE_VOTE))


def test_settle_stored_crcs_of_other_bytes_decide_nothing() -> None:
    world, save = job(2)
    alter(world, 0)
    majority_result = settle(world.inventory(), save, {W: 5})
    assert len(majority_result.undecided) == 1
    assert not majority_result.outvoted


def test_settle_holder_of_both_has_no_vote() -> None:
    """A mended copy beside the one that it is to replace says nothing about which is right."""
    world, save = job(2)
    own = world.machine(0).tensors[-1]
    copy = alter(world, 0)
    world.machine(0).tensors.append(own)
    assert not settle(world.inventory(), save).outvoted
    assert settle(world.inventory(), save, {W: GOOD}).outvoted == {copy}


@pytest.mark.parametrize("alone", [False, True])
def test_settle_served_copy_of_a_process_has_one_vote(alone: bool) -> None:
    """`eckpt serve` offers the directories of its host, also those of the job's processes."""
    world, save = job(2)
    copy = alter(world, 1)
    inventory = world.inventory()
    beside = next(each for each in inventory.holders if each.process_index == 1)
    server = msgspec.structs.replace(beside, holder="server/10.0.0.9:9000", process_index=None)
    others = [each for each in inventory.holders if each != beside or not alone]
    majority_result = settle(msgspec.structs.replace(inventory, holders=(*others, server)), save)
    assert not majority_result.outvoted, f"one copy of each of two bytes decides nothing: {copy}"
    assert len(majority_result.undecided) == 1


def test_settle_damaged_copy_keeps_its_vote() -> None:
    """Bytes that rot later do not make the altered copy right."""
    world, save = job(3)
    copy = alter(world, 2)
    held = world.machine(0).tensors[-1]
    world.quarantined.add(Quarantined("process/0", held.digest, copy.shard))
    assert settle(world.inventory(), save).outvoted == {copy}


def test_settle_other_saves_have_no_vote() -> None:
    world, _ = job(3)
    alter(world, 1)
    later = world.save(20, "a", complete=True)
    assert settle(world.inventory(), later) == MajorityResult()
    assert settle(world.inventory(), SaveId(10, "b", "run")) == MajorityResult()


def test_plan_replaces_the_survivors_own_outvoted_copy() -> None:
    world, save = job(3)
    copy = alter(world, 1)
    inventory = world.inventory()
    majority_result = settle(inventory, save)
    plan = planned(world, without(inventory, majority_result))
    plan = name_outvoted(plan, inventory, majority_result)
    part = plan.processes[1]
    assert [(g.digest, g.shards) for g in part.fetch] == [
        (world.machine(0).tensors[-1].digest, (copy.shard,))
    ]
    assert [read.shards for read in part.local] == [(0,)]
    assert part.outvoted == {copy.digest: (copy.shard,)}
    assert all(plan.processes[other].outvoted == {} for other in (0, 2))
    encoded = msgspec.json.encode(plan)
    assert msgspec.json.decode(encoded, type=RestorePlan) == plan


def test_name_outvoted_ignores_holders_outside_of_the_job() -> None:
    world, save = job(4)
    alter(world, 3)
    world.serve(3)
    inventory = world.inventory()
    majority_result = settle(inventory, save)
    assert {copy.holder for copy in majority_result.outvoted} == {"server/10.0.1.0:9000"}
    plan = planned(world, without(inventory, majority_result))
    assert name_outvoted(plan, inventory, majority_result) == plan
    assert plan.processes.get(3, ProcessPlan()).fetch


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_plan_uses_no_copy_of_an_altered_minority(data: st.DataObject) -> None:
    """With r replicas of a shard, any fewer than half of them altered alike are never used."""
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
    shard = data.draw(st.sampled_from(sorted(holders)))
    indices = [int(holder.holder.removeprefix("process/")) for holder in holders[shard]]
    altered = data.draw(st.lists(st.sampled_from(indices), unique=True))
    for process in altered:
        alter(world, process, shard.leaf)
    inventory = world.inventory()
    majority_result = settle(inventory, save)
    order = random.Random(data.draw(st.integers()))
    shuffled = msgspec.structs.replace(
        inventory, holders=tuple(order.sample(inventory.holders, len(inventory.holders)))
    )
    assert settle(shuffled, save) == majority_result
    replicas, count = len(holders[shard]), len(altered)
    named = {f"process/{process}" for process in altered}
    if 0 < 2 * count < replicas:
        event("a minority is altered")
        assert {copy.holder for copy in majority_result.outvoted} == named
        outcome = plan_restore(
            without(inventory, majority_result), world.layout.targets(), world.layout.leaves(),
            needs_host_state=False,
        )  # fmt: skip
        if isinstance(outcome, RestorePlan) and outcome.save == save:
            used = crcs_used(outcome, inventory, shard)
            assert {crc for _, crc in used} == {GOOD}
            assert not {holder for holder, _ in used} & named
    elif count and 2 * count == replicas:
        event("a tie")
        assert not majority_result.outvoted
        (tie,) = majority_result.undecided
        assert {crc: set(names) for crc, names in tie.copies}[BAD] == named
