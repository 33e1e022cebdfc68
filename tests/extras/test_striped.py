"""Striped placement: copies, slices, groups and bytes, on jobs of every shape."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.boxes import volume
from emergency_ckpt.core.placement import HeldLeaves, Topology, place_on
from emergency_ckpt.extras.striped import Striped, blocks
from emergency_ckpt.types import Box, ShardId


def grid(slices: int, hosts: int) -> Topology:
    return Topology(slices * hosts, tuple(p // hosts for p in range(slices * hosts)))


def regular(slices: int, hosts: int, sizes: list[int], cut: int | None = None) -> list[HeldLeaves]:
    """Leaves of ``sizes`` bytes per box, cut over ``cut`` hosts of a slice (all when None).

    Where ``cut`` is less, each box is held by several hosts of every slice.
    """
    parts = hosts if cut is None else cut
    found: list[HeldLeaves] = []
    for number, size in enumerate(sizes):
        holders: dict[Box, tuple[int, ...]] = {
            ((part * size, (part + 1) * size),): tuple(
                p for p in range(slices * hosts) if p % hosts % parts == part
            )
            for part in range(parts)
        }
        found.append(HeldLeaves((parts * size,), {f"leaf{number:04}": 1}, holders))
    return found


def place_on_all(
    policy: Striped, topology: Topology, held: list[HeldLeaves]
) -> dict[int, tuple[ShardId, ...]]:
    return place_on(policy, topology, range(topology.process_count), held)


def stored_bytes(stored: dict[int, tuple[ShardId, ...]]) -> list[int]:
    return [sum(volume(shard.box) for shard in shards) for shards in stored.values()]


def check_even(loads: list[int], largest: int, shards: float = 1) -> None:
    """No host is further from the mean than 2% or one shard."""
    mean = sum(loads) / len(loads)
    most = max(max(loads) - mean, mean - min(loads))
    assert most <= max(shards * largest, 0.02 * mean), loads


@st.composite
def any_jobs(draw: st.DrawFn) -> tuple[Topology, list[HeldLeaves]]:
    """Slices of unequal size; boxes on any processes."""
    slices = draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
    topology = Topology(len(slices), tuple(slices))
    leaves: list[HeldLeaves] = []
    for number in range(draw(st.integers(1, 5))):
        sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
        holders: dict[Box, tuple[int, ...]] = {}
        start = 0
        for size in sizes:
            by = draw(st.sets(st.integers(0, len(slices) - 1), min_size=1))
            holders[((start, start + size),)] = tuple(sorted(by))
            start += size
        if len(holders) == len(sizes):
            leaves.append(HeldLeaves((start,), {f"w{number}": 1, f"v{number}": 4}, holders))
    return topology, leaves


@given(any_jobs(), st.integers(1, 6), st.sampled_from([0, 200]))
def test_every_shard_is_once_on_each_of_the_slices_asked_for(
    job: tuple[Topology, list[HeldLeaves]], copies: int, small: int
) -> None:
    topology, held = job
    stored = place_on_all(Striped(copies, small), topology, held)
    for leaves in held:
        for path, item_bytes in leaves.item_bytes.items():
            for box, holders in leaves.holders.items():
                by = [p for p, shards in stored.items() if ShardId(path, box) in shards]
                assert set(by) <= set(holders)
                if leaves.shape[0] * item_bytes < small:
                    assert by == list(holders)
                    continue
                slices = [topology.slice_of[process] for process in by]
                having = {topology.slice_of[process] for process in holders}
                assert len(slices) == len(set(slices)) == min(copies, len(having))


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 10),
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
)
def test_bytes_per_host_are_even(slices: int, hosts: int, copies: int, sizes: list[int]) -> None:
    stored = place_on_all(Striped(copies, 0), grid(slices, hosts), regular(slices, hosts, sizes))
    # With fewer shards than slices, blocks that share slices and one that does not cannot always
    # be balanced one shard after the other: 9 slices, 4 copies, sizes 6, 6, 9.
    check_even(stored_bytes(stored), max(sizes), 1 if len(sizes) >= slices else 1.25)
    part = min(copies, slices) * sum(sizes) / slices
    assert abs(sum(stored_bytes(stored)) / len(stored) - part) < 1e-6 * part


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.integers(1, 1000), max_size=20),
    st.lists(st.integers(1, 1000), max_size=20),
)
def test_leaves_replicated_in_a_slice_are_stored_once_and_spread(
    slices: int, hosts: int, copies: int, whole: list[int], cut: list[int]
) -> None:
    held = regular(slices, 2 * hosts, whole, cut=hosts) + [
        HeldLeaves(leaves.shape, {f"cut/{path}": 1 for path in leaves.item_bytes}, leaves.holders)
        for leaves in regular(slices, 2 * hosts, cut)
    ]
    stored = place_on_all(Striped(copies, 0), grid(slices, 2 * hosts), held)
    # The two kinds are dealt one after the other, each even within one shard of its own; or, as
    # above, a little more where there are fewer shards than places: 4 slices, 3 copies, 3 shards.
    many = all(len(sizes) >= 2 * slices for sizes in (whole, cut) if sizes)
    largest = max(whole, default=0) + max(cut, default=0)
    check_even(stored_bytes(stored), largest, 1 if many else 1.25)


@pytest.mark.dear
@given(st.integers(1, 12), st.integers(1, 14))
def test_blocks_can_be_filled_so_that_slices_get_equally_much(slices: int, copies: int) -> None:
    found = blocks(range(slices), copies)
    assert all(len(set(block)) == len(block) == min(copies, slices) for block in found)
    assert len(found) == len(set(map(frozenset, found)))
    sizes = [1] * (60 * slices)
    stored = place_on_all(Striped(copies, 0), grid(slices, 1), regular(slices, 1, sizes))
    loads = stored_bytes(stored)
    assert max(loads) - min(loads) <= 1


def test_blocks_are_groups_and_not_a_ring() -> None:
    assert blocks(range(4), 2) == ((0, 1), (2, 3))
    assert set(map(frozenset, blocks(range(5), 2))) == {
        frozenset(pair) for pair in ((0, 1), (2, 3), (2, 4), (3, 4))
    }
    assert blocks((3, 5, 9), 7) == ((3, 5, 9),)
    assert len(blocks(range(5), 3)) == 4
    assert len(blocks(range(1000), 999)) == 1000


@pytest.mark.parametrize("cut", [None, 1])
def test_hosts_that_are_fatal_together_stand_at_one_position(cut: int | None) -> None:
    slices, hosts = 4, 3
    held = regular(slices, hosts, [10] * 60, cut)
    stored = place_on_all(Striped(2, 0), grid(slices, hosts), held)
    copies: dict[ShardId, list[int]] = {}
    for process, shards in stored.items():
        for shard in shards:
            copies.setdefault(shard, []).append(process)
    pairs = Counter(map(tuple, copies.values()))
    assert set(pairs) == {(p, p + hosts) for p in range(12) if p // hosts in (0, 2)}
    assert len(set(pairs.values())) == 1


def test_process_with_nothing_to_store_stores_nothing() -> None:
    stored = place_on_all(Striped(1, 0), grid(3, 1), regular(3, 1, [8]))
    assert sorted(map(len, stored.values())) == [0, 0, 1]
