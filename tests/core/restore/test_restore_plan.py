"""Parts of the planner that scenarios do not show: size of plans, contradictions, leaves."""

from __future__ import annotations

import msgspec
import pytest
from planner_world import Layout, PlannerWorld, contents_of
from process_parts import parts_of

from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    HolderInventory,
    Inventory,
    PersistentStep,
)
from emergency_ckpt.core.restore.leaves import compare_leaves
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan, clip
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.core.timeline import plain_incarnation
from emergency_ckpt.core.wording import few
from emergency_ckpt.types import LeafSpec, SaveId

FIRST, SECOND = (f"{number:012d}-5e" for number in (1, 2))
LATER = plain_incarnation(1, "5e")


def planned(world: PlannerWorld, inventory: Inventory | None = None) -> RestorePlan:
    layout = world.layout
    plan = plan_restore(inventory or world.inventory(), layout.targets(), layout.leaves())
    assert isinstance(plan, RestorePlan), plan
    return plan


def planned_with(world: PlannerWorld, stored: PersistentStep) -> RestorePlan:
    """The plan beside a stored step that is later than ``saved``."""
    return planned(world, msgspec.structs.replace(world.inventory(), persistent=(stored,)))


def saved(slices: int = 2, hosts: int = 2, life: str = "a") -> PlannerWorld:
    world = PlannerWorld(Layout(slices, hosts))
    world.save(40, life, complete=True)
    return world


def test_answer_to_a_process_with_its_own_copy_is_tiny() -> None:
    paths = tuple(f"params/layer{i:03}/attention/kernel" for i in range(300))
    world = PlannerWorld(Layout(2, 2, sharded=paths))
    world.save(40, "a", complete=True)
    plan = planned(world)
    assert len(msgspec.json.encode(plan.copies[3])) < 512
    share = plan.share_of([3])
    assert set(share.copies) == {3}
    assert len(msgspec.json.encode(share)) < 1024
    assert msgspec.json.decode(msgspec.json.encode(share), type=RestorePlan | NoPlan) == share


def test_answer_to_eight_processes_does_not_grow_with_the_job() -> None:
    """It names at most eight holders of a manifest, and the address of each once."""
    shares = [planned(saved(slices=slices)).share_of(range(8)) for slices in (32, 128)]
    small, large = (msgspec.json.encode(share) for share in shares)
    assert len(large) < 1.1 * len(small)
    for address in shares[1].addresses.values():
        assert large.count(f'"{address}"'.encode()) == 1


def test_two_holders_of_one_name_are_both_ignored() -> None:
    world = saved()
    inventory = world.inventory()
    impostor = msgspec.structs.replace(inventory.holders[1], address="10.9.9.9:1", tensors=())
    inventory = msgspec.structs.replace(inventory, holders=(*inventory.holders, impostor))
    plan = planned(world, inventory)
    part = parts_of(plan, inventory, world.layout.targets())[1]
    assert [group.sources for group in part.fetch] == [("process/3",)]
    both = msgspec.structs.replace(inventory, holders=(inventory.holders[1], impostor))
    nothing = plan_restore(both, world.layout.targets(), world.layout.leaves())
    assert isinstance(nothing, NoPlan)
    assert "ignored process/1" in nothing.notes[0]


def with_host_states(world: PlannerWorld, digests: dict[int, str]) -> None:
    """Machine i holds a host state of process 0 with the given digest."""
    for machine in world.machines:
        machine.host_states = [s for s in machine.host_states if s.owner != 0]
    for index, digest in digests.items():
        state = HeldHostState(SaveId(40, "a", "run"), 0, world.layout.process_count, digest, 9,
                              empty=False)  # fmt: skip
        world.machines[index].host_states.append(state)


@pytest.mark.parametrize("digests", [("x", "y", "y"), ("y", "x", "y"), ("y", "y", "x")])
def test_smaller_digest_of_two_host_states_is_used(digests: tuple[str, ...]) -> None:
    """Whoever has the other one, and however many: nobody can know which is right."""
    world = saved(slices=3, hosts=1)
    with_host_states(world, dict(enumerate(digests)))
    plan = planned(world)
    (state,) = plan.copies[0].host_states
    assert (state.digest, set(state.sources)) == ("x", {f"process/{digests.index('x')}"})


def test_manifest_that_claims_another_save_is_not_used() -> None:
    world = saved(slices=1, hosts=1)
    save = SaveId(45, "a", "run")
    digest = world.machines[0].tensors[0].digest
    world.machines[0].tensors.append(HeldTensors(save, digest))
    plan = planned(world)
    assert plan.step == 40
    assert "is of another save (step 40)" in plan.rejected[0].reason


def test_reasons_are_bounded() -> None:
    world = PlannerWorld(Layout(1, 2, rows=8, sharded=tuple(f"w{i}" * 30 for i in range(50))))
    for step in range(100):
        world.save(step, "a", by=[0])
    outcome = plan_restore(world.inventory(), world.layout.targets(), world.layout.leaves())
    assert isinstance(outcome, NoPlan)
    assert len(outcome.rejected) == 32
    assert [item.step for item in outcome.rejected] == list(range(99, 67, -1))
    assert all(len(item.reason) <= 400 for item in outcome.rejected)
    assert clip("x" * 401) == "x" * 397 + "..."
    assert few(range(6)) == "0, 1, 2, 3 and 2 more"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([], "w: expected float32(2,), not in the checkpoint"),
        ([LeafSpec("w", "int8", (2,))], "w: expected dtype float32, checkpoint has dtype int8"),
        (
            [LeafSpec("w", "float32", (3,))],
            "w: expected shape (2,), checkpoint has shape (3,)",
        ),
        (
            [LeafSpec("w", "float32", (2,), "rbg")],
            "w: expected key_impl None, checkpoint has key_impl rbg",
        ),
        (
            [LeafSpec("w", "float32", (2,)), LeafSpec("x", "uint32", (1,), "rbg")],
            "x: not in the given state, checkpoint has uint32(1,) key rbg",
        ),
        (
            [LeafSpec("w", "float32", (2,)), LeafSpec("w", "int8", (2,))],
            "w: stored with two different descriptions",
        ),
    ],
)
def test_compare_leaves_names_both_values(found: list[LeafSpec], line: str) -> None:
    assert compare_leaves({"w": LeafSpec("w", "float32", (2,))}, found) == (line,)


def test_compare_leaves_of_equal_leaves_is_empty_in_any_order() -> None:
    leaves = {path: LeafSpec(path, "float32", (2,)) for path in "ab"}
    assert compare_leaves(leaves, reversed(list(leaves.values()))) == ()


def test_one_copy_not_empty_is_enough_to_need_host_states() -> None:
    world = PlannerWorld(Layout(2, 1))
    world.save(40, "a", empty=True)
    with_host_states(world, {0: "x"})
    empty = world.machines[1].host_states[0]
    world.machines[1].host_states.append(msgspec.structs.replace(empty, owner=0, digest="a"))
    outcome = plan_restore(
        world.inventory(), dict.fromkeys(range(3), world.layout.shards(0)), world.layout.leaves()
    )
    assert isinstance(outcome, NoPlan)
    assert (outcome.kind, outcome.saved_count, outcome.process_count) == ("host_state_count", 2, 3)


def test_shard_in_different_manifests_comes_from_each_in_turn() -> None:
    """Only even processes fetch: going round by process index alone would load one holder."""
    layout, save = Layout(1, 1), SaveId(40, "a", "run")
    leaves, (b, w) = layout.leaves(), layout.shards(0)
    manifests = {
        "d0": contents_of(save, leaves, (w,)),
        "d1": contents_of(save, leaves, (b, w)),
    }
    holders = tuple(
        HolderInventory(f"process/{i}", i, f"h:{i}", (HeldTensors(save, f"d{i}"),), ())
        for i in range(2)
    )
    inventory, targets = Inventory(holders, manifests), dict.fromkeys((0, 1, 2, 4, 6, 8), (w,))
    plan = plan_restore(inventory, targets, leaves, needs_host_state=False)
    assert isinstance(plan, RestorePlan)
    parts = parts_of(plan, inventory, targets)
    sources = [parts[p].fetch[0].sources[0] for p in (2, 4, 6, 8)]
    assert sorted(sources) == ["process/0"] * 2 + ["process/1"] * 2


@pytest.mark.parametrize(("tensors_of", "is_stored"), [(FIRST, False), (SECOND, True), ("", True)])
def test_stored_tensors_of_a_save_never_precede_that_save(
    tensors_of: str, *, is_stored: bool
) -> None:
    world = saved(life=FIRST)
    stored = PersistentStep(40, 0, False, LATER, tensors_of=tensors_of)
    assert (planned_with(world, stored).save is None) == is_stored


def test_step_of_another_program_never_precedes_ram() -> None:
    stored = PersistentStep(40, 0, False, LATER, "another program wrote it", is_foreign=True)
    assert planned_with(saved(life=FIRST), stored).save is not None


def test_stored_tensors_of_a_save_follow_what_is_left_of_it() -> None:
    world = saved(life=FIRST)
    for process in range(4):
        world.lose(process)
    stored = PersistentStep(40, 0, False, LATER, tensors_of=FIRST)
    assert planned_with(world, stored).save is None
