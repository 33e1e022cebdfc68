"""Who writes: one lead, one scribe for each host state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.placement import (
    AllButPrimary,
    HeldLeaves,
    PlacementPolicy,
    Topology,
    host_state_writer,
    owners_of,
    writers_from_ram,
)
from emergency_ckpt.extras.striped import Striped

TOPOLOGIES = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(
    lambda slices: Topology(len(slices), tuple(slices))
)


@given(TOPOLOGIES)
def test_each_host_state_has_one_scribe_among_the_writers(topology: Topology) -> None:
    members = topology.writers
    written = [owner for writer in members for owner in owners_of(writer, topology, members)]
    assert sorted(written) == list(range(topology.process_count))
    assert all(host_state_writer(member, topology, members) == member for member in members)


def test_first_slice_writes() -> None:
    assert Topology(4, (1, 0, 1, 0)).writers == (1, 3)


def held_by_position(slices: int, hosts: int) -> list[HeldLeaves]:
    """Each host of a slice holds a part of ``w``, which every slice has."""
    parts = {
        ((4 * host, 4 * host + 4),): tuple(hosts * index + host for index in range(slices))
        for host in range(hosts)
    }
    return [HeldLeaves((4 * hosts,), {"w": 4}, parts)]


@pytest.mark.parametrize(
    ("slices", "policy", "expected"),
    [
        (1, AllButPrimary(), ((0, 1), (0, 1))),
        (2, AllButPrimary(), ((0, 1), (0, 1))),
        (3, AllButPrimary(), ((0, 2, 3), (2, 3))),
        (4, Striped(4, 0), ((0, 1), (0, 1))),
        (4, Striped(2, 0), ((), ())),
    ],
)
def test_writers_from_ram_store_all_that_they_hold(
    slices: int, policy: PlacementPolicy, expected: tuple[object, object]
) -> None:
    topology = Topology(2 * slices, tuple(process // 2 for process in range(2 * slices)))
    assert writers_from_ram(policy, topology, held_by_position(slices, 2)) == expected
