"""Placement and buddies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.placement import (
    AllButPrimary,
    HeldLeaves,
    Topology,
    buddies,
    place,
    place_on,
    single_copies,
)
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.types import ShardId

TOPOLOGIES = st.lists(st.integers(0, 4), min_size=1, max_size=14).map(
    lambda slices: Topology(len(slices), tuple(slices))
)
SHARD, OTHER = ShardId("w", ((0, 4),)), ShardId("w", ((4, 8),))


def grid(slices: int, hosts: int) -> Topology:
    return Topology(slices * hosts, tuple(p // hosts for p in range(slices * hosts)))


def held_alike(holders: dict[ShardId, tuple[int, ...]]) -> list[HeldLeaves]:
    """The leaf ``w`` of eight one-byte elements."""
    return [HeldLeaves((8,), {"w": 1}, {shard.box: by for shard, by in holders.items()})]


@pytest.mark.parametrize("policy", [AllButPrimary(), Striped(1, 0), Striped(2, 0), Striped(2)])
@given(data=st.data(), topology=TOPOLOGIES)
def test_single_copies_are_those_that_place_makes(
    data: st.DataObject, topology: Topology, policy: AllButPrimary | Striped
) -> None:
    processes = range(topology.process_count)
    some = st.sets(st.sampled_from(processes), min_size=1).map(lambda found: tuple(sorted(found)))
    held = held_alike({SHARD: data.draw(some), OTHER: data.draw(some)})
    placed = place_on(policy, topology, processes, held)
    stored = [shard for process in processes for shard in placed[process]]
    found = single_copies(policy, topology, held)
    assert found.nbytes == 4 * sum(stored.count(shard) == 1 for shard in (SHARD, OTHER))
    assert found.total_bytes == 8
    assert found.leaf == ("w" if found.nbytes else "")


def stores(topology: Topology, process: int, held_by: set[int]) -> bool:
    """``held_by``: one process of each of these slices."""
    holders = tuple(topology.members[index][0] for index in sorted(held_by))
    return place(AllButPrimary(), topology, process, held_alike({SHARD: holders})) == (SHARD,)


@given(st.data(), TOPOLOGIES, st.sampled_from([AllButPrimary(), Striped(1), Striped(2, 0)]))
def test_place_on_all_is_place_of_every_process(
    data: st.DataObject, topology: Topology, policy: AllButPrimary | Striped
) -> None:
    processes = range(topology.process_count)
    some = st.sets(st.sampled_from(processes), min_size=1).map(lambda found: tuple(sorted(found)))
    held = held_alike({SHARD: data.draw(some), OTHER: data.draw(some)})
    assert place_on(policy, topology, processes, held) == {
        process: place(policy, topology, process, held) for process in processes
    }


@pytest.mark.parametrize(
    ("held_by", "storing"),
    [
        ({0}, {0}),
        ({1}, {1}),
        ({0, 1}, {0, 1}),
        ({0, 1, 2}, {1, 2}),
        ({0, 1, 2, 3}, {1, 2, 3}),
        ({1, 2, 3}, {1, 2, 3}),
    ],
)
def test_primary_stores_only_what_has_under_two_other_holders(
    held_by: set[int], storing: set[int]
) -> None:
    topology = grid(4, 1)
    assert {p for p in held_by if stores(topology, p, held_by)} == storing


@given(st.integers(2, 5), st.data())
def test_shard_on_several_slices_survives_any_slice(slices: int, data: st.DataObject) -> None:
    topology = grid(slices, 2)
    held_by = data.draw(st.sets(st.integers(0, slices - 1), min_size=2))
    storing = {s for s in held_by if stores(topology, 2 * s, held_by)}
    assert all(storing - {lost} for lost in range(slices))


def test_place_returns_each_shard_once_and_sorted() -> None:
    held = held_alike({OTHER: (0,), SHARD: (0,)})
    assert place(AllButPrimary(), grid(1, 1), 0, held) == (SHARD, OTHER)
    assert place(Striped(1), grid(1, 1), 0, held) == (SHARD, OTHER)


def test_policies_are_parsed() -> None:
    assert parse_placement("all_but_primary") == AllButPrimary()
    assert parse_placement("striped(2)") == Striped(2)
    with pytest.raises(ConfigError, match="number of copies"):
        parse_placement("striped(0)")


@given(TOPOLOGIES)
def test_each_other_slice_has_one_buddy(topology: Topology) -> None:
    for process in range(topology.process_count):
        slices = [topology.slice_of[b] for b in buddies(process, topology)]
        assert sorted([*slices, topology.slice_of[process]]) == sorted(topology.slices)


def test_buddies_have_the_same_position() -> None:
    assert buddies(1, grid(3, 2)) == (3, 5)
    assert buddies(3, grid(3, 2)) == (5, 1)
    assert buddies(0, grid(1, 4)) == ()
    uneven = Topology(4, (0, 0, 0, 1))
    assert [buddies(p, uneven) for p in range(4)] == [(3,), (3,), (3,), (0,)]


@pytest.mark.parametrize(("count", "slices"), [(2, (0,)), (0, ()), (1, (-1,))])
def test_impossible_topology_is_refused(count: int, slices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Topology(count, slices)


def test_topology_names_members_and_positions() -> None:
    topology = Topology(4, (1, 0, 1, 0))
    assert topology.slices == (0, 1)
    assert topology.members == {0: (1, 3), 1: (0, 2)}
    assert [topology.position(p) for p in range(4)] == [0, 0, 1, 1]
