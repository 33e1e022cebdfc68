"""Properties of the planner, against a slow oracle that shares no code with it."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plan_oracle import Oracle
from planner_world import Layout, PlannerWorld, with_sets
from process_parts import parts_of

from emergency_ckpt.core.restore.inventory import (
    HeldHostState,
    HeldTensors,
    HolderInventory,
    Inventory,
    PersistentStep,
    Quarantined,
)
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardEntry, ShardId

LEAVES = (LeafSpec("a", "float32", (4,)), LeafSpec("b", "int32", ()), LeafSpec("c", "int8", (2, 2)))
FOREIGN = (LeafSpec("a", "float32", (3,)), LeafSpec("k", "uint32", (1,), "threefry2x32"))
SAVES = [SaveId(1, "a", "r"), SaveId(2, "a", "r"), SaveId(2, "b", "r")]
BOXES = [
    ((0, 4),), ((0, 2),), ((2, 4),), ((1, 3),), ((0, 3),), ((0, 1),), ((2, 2),), (),
    ((0, 2), (0, 2)), ((0, 1), (0, 2)), ((1, 2), (0, 2)), ((0, 2), (1, 2)), ((3, 1),),
]  # fmt: skip
FITTING = [
    (leaf, box)
    for leaf, rank in ((0, 1), (1, 0), (2, 2))
    for box in BOXES
    if len(box) == rank and all(start <= stop for start, stop in box)
]
DIGESTS = [f"d{i}" for i in range(6)]
HOLDERS = [("process/0", 0), ("process/1", 1), ("process/2", 2), ("server/x", None), ("odd", 1)]
ROUNDS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def contents(draw: st.DrawFn) -> Contents:
    """Mostly whole leaves, cut in different ways; now and then shards that make no sense."""
    save = draw(st.sampled_from(SAVES))
    if draw(st.integers(0, 5)) == 0:
        shards = {(0, ((0, 3),)), (1, ((0, 1),))}
        leaves = FOREIGN
    else:
        shards = draw(st.sets(st.sampled_from(FITTING), min_size=4, max_size=len(FITTING)))
        shards |= draw(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(BOXES)), max_size=1))
        leaves = LEAVES
    entries = [
        ShardEntry(leaf, box, 64 * i, 8 * i, i) for i, (leaf, box) in enumerate(sorted(shards))
    ]
    return Contents(save, leaves, tuple(entries))


@st.composite
def odd_inventories(draw: st.DrawFn) -> Inventory:
    """Anything of the right types: contradictory, incomplete, of several saves."""
    manifests = draw(st.dictionaries(st.sampled_from(DIGESTS), contents(), max_size=6))
    held = [HeldTensors(m.save, digest) for digest, m in manifests.items()]
    odd = st.builds(HeldTensors, st.sampled_from(SAVES), st.sampled_from(DIGESTS))
    tensors = st.lists(st.sampled_from(held) | odd if held else odd, max_size=6)
    states = st.lists(
        st.builds(
            HeldHostState,
            st.sampled_from(SAVES),
            st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1]),
            st.sampled_from([1, 2, 2, 3, 0]),
            st.sampled_from(["h0", "h1"]),
            st.just(10),
            st.booleans(),
        ),
        max_size=8,
    )
    holders: list[HolderInventory] = []
    for name, index in draw(st.lists(st.sampled_from(HOLDERS), max_size=5)):
        known = draw(st.none() | st.sampled_from(SAVES))
        parts = (tuple(draw(tensors)), tuple(draw(states)))
        holders.append(HolderInventory(name, index, f"{name}:1", *parts, known))
    names = st.sampled_from([name for name, _ in HOLDERS])
    digests = st.sampled_from([*DIGESTS, "h0"])
    bad = st.builds(Quarantined, names, digests, st.none() | st.integers(0, 4))
    bad |= st.just(Quarantined("persistent", "persistent/2"))
    persistent = st.builds(PersistentStep, st.integers(0, 2), st.integers(1, 3), st.booleans())
    return Inventory(
        tuple(holders),
        manifests,
        tuple(draw(st.lists(persistent, max_size=1))),
        frozenset(draw(st.sets(bad, max_size=4))),
    )


def targets() -> st.SearchStrategy[dict[int, tuple[ShardId, ...]]]:
    fitting = [ShardId(LEAVES[leaf].path, box) for leaf, box in FITTING]
    odd = st.builds(ShardId, st.sampled_from(["a", "b", "z"]), st.sampled_from(BOXES))
    shard = st.integers(0, 19).flatmap(lambda n: odd if n == 0 else st.sampled_from(fitting))
    return st.dictionaries(
        st.integers(0, 2),
        st.lists(shard, max_size=4, unique=True).map(tuple),  # as ``TargetSet`` says
        min_size=1,
        max_size=3,
    ).map(lambda chosen: dict(enumerate(chosen.values())))


@st.composite
def worlds(draw: st.DrawFn) -> PlannerWorld:
    """A job that saved a few times, was struck, and starts again."""
    layout = Layout(draw(st.integers(1, 4)), draw(st.integers(1, 3)), rows=12)
    world, count = PlannerWorld(layout), layout.process_count
    saves = draw(st.lists(st.tuples(st.sampled_from([10, 20, 30]), st.sampled_from("ab")),
                          max_size=3, unique=True))  # fmt: skip
    process = st.integers(0, count - 1)
    for step, life in saves:
        by = draw(st.none() | st.lists(process, unique=True, min_size=1))
        world.save(step, life, by, empty=draw(st.booleans()), complete=by is None)
    for lost in draw(st.lists(process, unique=True, max_size=count // 2 + 1)):
        world.lose(lost)
    for machine in world.machines:
        if machine.tensors and draw(st.integers(0, 7)) == 0:
            machine.tensors.pop(draw(st.integers(0, len(machine.tensors) - 1)))
        if machine.host_states and draw(st.integers(0, 7)) == 0:
            machine.host_states.pop(draw(st.integers(0, len(machine.host_states) - 1)))
    for held in draw(st.lists(process, max_size=2)):
        for item in world.machine(held).tensors[-1:]:
            shard = draw(st.none() | st.integers(0, 1))
            world.quarantined.add(Quarantined(f"process/{held}", item.digest, shard))
    if draw(st.booleans()):
        world.persistent.append(PersistentStep(15, count, has_host_state=True))
    if draw(st.booleans()):
        layout = Layout(draw(st.integers(1, 4)), draw(st.integers(1, 3)), rows=12)
    world.restart(layout, draw(st.permutations(range(layout.process_count))))
    return world


def check(inventory: Inventory, wanted: dict[int, tuple[ShardId, ...]],
          leaves: dict[str, LeafSpec], step: int | None, remap: bool, states: bool,
          seed: int) -> None:  # fmt: skip
    outcome = plan_restore(
        inventory,
        wanted,
        leaves,
        requested_step=step,
        host_state_remap=remap,
        needs_host_state=states,
    )
    oracle = Oracle(inventory, wanted, leaves, remap=remap, needs_host_state=states)
    kind, expected_step, save = oracle.verdict(step)
    if isinstance(outcome, NoPlan):
        event(outcome.kind)
    else:
        event("from RAM" if outcome.save else "from storage")
    if isinstance(outcome, RestorePlan):
        assert (kind, expected_step, save) == ("restore", outcome.step, outcome.save)
        oracle.check_plan(outcome)
        assert all(rejection.step >= outcome.step for rejection in outcome.rejected)
        assert all(len(rejection.reason) <= 400 for rejection in outcome.rejected)
    elif outcome.kind in ("state_mismatch", "host_state_count"):
        assert (kind, expected_step) == (outcome.kind, outcome.step)
    else:
        assert kind == "none"
        if step is not None:
            assert outcome.kind == "step_not_found"
        else:
            assert outcome.kind == ("unrecoverable" if was_whole(oracle) else "nothing")
    named = with_sets(inventory, wanted, leaves)
    for item in (named, msgspec.structs.replace(named, manifests={})):
        by_names = plan_restore(
            item,
            wanted,
            leaves,
            requested_step=step,
            host_state_remap=remap,
            needs_host_state=states,
        )
        if item is named:
            assert verdict_of(by_names) == verdict_of(outcome)
        if isinstance(by_names, RestorePlan) and by_names.save is not None:
            # Without manifests an older save may be chosen, and the leader reads the newer's.
            assert isinstance(outcome, RestorePlan)
            assert by_names.step <= outcome.step
            oracle.check_plan(by_names)
            event("whole copies")
    again = plan_restore(
        shuffled(inventory, seed),
        dict(sorted(wanted.items(), reverse=True)),
        dict(sorted(leaves.items(), reverse=True)),
        requested_step=step,
        host_state_remap=remap,
        needs_host_state=states,
    )
    assert again == outcome
    encoded = msgspec.json.encode(outcome)
    assert msgspec.json.decode(encoded, type=RestorePlan | NoPlan) == outcome


def verdict_of(outcome: RestorePlan | NoPlan) -> tuple[object, ...]:
    if isinstance(outcome, RestorePlan):
        return outcome.step, outcome.save, outcome.rejected
    return outcome.kind, outcome.step


def was_whole(oracle: Oracle) -> bool:
    """Whether there was a whole step at some time, as far as one can know."""
    inventory = oracle.inventory
    before = Oracle(
        msgspec.structs.replace(inventory, quarantined=frozenset()),
        oracle.targets,
        oracle.leaves,
        remap=oracle.remap,
        needs_host_state=oracle.needs_host_state,
    )
    return (
        bool(inventory.persistent)
        or any(holder.known_complete for holder in oracle.holders.values())
        or before.verdict(None)[0] != "none"
    )


def shuffled(inventory: Inventory, seed: int) -> Inventory:
    """The same inventory, each of its collections in another order."""
    order = random.Random(seed)

    def mixed(items: tuple) -> tuple:
        return tuple(order.sample(items, len(items)))

    holders = [
        msgspec.structs.replace(h, tensors=mixed(h.tensors), host_states=mixed(h.host_states))
        for h in mixed(inventory.holders)
    ]
    return Inventory(
        tuple(holders),
        dict(mixed(tuple(inventory.manifests.items()))),
        mixed(inventory.persistent),
        inventory.quarantined,
    )


OPTIONS = (st.sampled_from([None, None, None, 2, 20]), st.booleans(), st.booleans(), st.integers())


@pytest.mark.dear
@ROUNDS
@given(worlds(), *OPTIONS)
def test_plan_of_a_struck_job_agrees_with_the_oracle(
    world: PlannerWorld, step: int | None, remap: bool, states: bool, seed: int
) -> None:
    layout = world.layout
    check(world.inventory(), layout.targets(), layout.leaves(), step, remap, states, seed)


@pytest.mark.dear
@ROUNDS
@given(odd_inventories(), targets(), *OPTIONS)
def test_plan_of_any_inventory_agrees_with_the_oracle(
    inventory: Inventory,
    wanted: dict[int, tuple[ShardId, ...]],
    step: int | None,
    remap: bool,
    states: bool,
    seed: int,
) -> None:
    leaves = {leaf.path: leaf for leaf in LEAVES}
    check(inventory, wanted, leaves, step, remap, states, seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_remote_load_is_balanced_over_equal_holders(
    slices: int, hosts: int, data: st.DataObject
) -> None:
    """Holders of one manifest have sent equally much, but for a shard a process that fetched."""
    sharded = tuple(f"w{i:02}" for i in range(data.draw(st.integers(1, 20))))
    world = PlannerWorld(Layout(slices, hosts, rows=6, sharded=sharded))
    world.save(10, "a", complete=True)
    lost = data.draw(st.integers(1 if slices > 2 else 0, slices - 1))
    for process in range(lost * hosts, (lost + 1) * hosts):
        world.lose(process)
    inventory = world.inventory()
    plan = plan_restore(inventory, world.layout.targets(), world.layout.leaves())
    assert isinstance(plan, RestorePlan)
    holders = {
        t.digest: [h.holder for h in inventory.holders if t in h.tensors]
        for holder in inventory.holders
        for t in holder.tensors
    }
    sent = dict.fromkeys((holder.holder for holder in inventory.holders), 0)
    fetched: dict[str, set[int]] = {}
    for process, part in parts_of(plan, inventory, world.layout.targets()).items():
        for group in part.fetch:
            shards = inventory.manifests[group.digest].shards
            fetched.setdefault(group.digest, set()).add(process)
            for index in group.shards:
                sent[group.sources[0]] += shards[index].nbytes
    for digest, names in holders.items():
        shards = inventory.manifests[digest].shards
        if shards:
            largest = max(entry.nbytes for entry in shards)
            loads = [sent[name] for name in names]
            assert max(loads) - min(loads) <= largest * len(fetched.get(digest, ()))
