"""Survival of the RAM tier: exact forms against real placements, and against the known table."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import comb
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergency_ckpt.core.placement import (
    AllButPrimary,
    HeldLeaves,
    PlacementPolicy,
    Topology,
    place_on,
)
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.tools.placement_study import (
    loss_probabilities,
    slices_that_may_fail,
)
from emergency_ckpt.types import Box, ShardId


def stored_by_job(
    policy: PlacementPolicy, slices: int, hosts: int, leaves: int = 40
) -> dict[int, tuple[ShardId, ...]]:
    """What the processes of a real placement store: many equal leaves, cut over each slice."""
    holders: dict[Box, tuple[int, ...]] = {
        ((position, position + 1),): tuple(range(position, slices * hosts, hosts))
        for position in range(hosts)
    }
    held = [HeldLeaves((hosts,), {f"leaf{number}": 4}, holders) for number in range(leaves)]
    topology = Topology(slices * hosts, tuple(p // hosts for p in range(slices * hosts)))
    return place_on(policy, topology, range(topology.process_count), held)


def is_lost(stored: dict[int, tuple[ShardId, ...]], lost: Iterable[int]) -> bool:
    """True when a job that stores ``stored`` has no copy of some shard without ``lost``."""
    gone = set(lost)
    kept = {shard for process, shards in stored.items() if process not in gone for shard in shards}
    return any(set(stored.get(process, ())) - kept for process in gone)


def counted(stored: dict[int, tuple[ShardId, ...]], lost: int) -> float:
    sets = list(combinations(sorted(stored), lost))
    return sum(is_lost(stored, each) for each in sets) / len(sets)


POLICIES = st.one_of(st.just(AllButPrimary()), st.integers(1, 6).map(lambda r: Striped(r, 0)))


@settings(deadline=None, max_examples=60)
@given(POLICIES, st.integers(1, 6), st.integers(1, 3), st.integers(0, 6))
def test_exact_form_counts_what_real_placements_lose(
    policy: PlacementPolicy, slices: int, hosts: int, lost: int
) -> None:
    lost = min(lost, slices * hosts)
    if comb(slices * hosts, lost) > 4000:
        hosts = 1
        lost = min(lost, slices)
    stored = stored_by_job(policy, slices, hosts)
    expected = counted(stored, lost)
    found = loss_probabilities(policy, slices, hosts, lost)[lost]
    assert found >= expected - 1e-12, "never too good"
    if policy.copies is None or policy.copies <= 2 or slices % min(policy.copies, slices) == 0:
        assert found == pytest.approx(expected, abs=1e-12)


@given(POLICIES, st.integers(1, 8), st.integers(1, 5), st.integers(0, 40))
def test_losses_of_fewer_hosts_are_the_same_beside_more(
    policy: PlacementPolicy, slices: int, hosts: int, most: int
) -> None:
    most = min(most, slices * hosts)
    found = loss_probabilities(policy, slices, hosts, most)
    assert found == [loss_probabilities(policy, slices, hosts, k)[k] for k in range(most + 1)]
    assert found == sorted(found)
    assert found[0] == 0


def test_random_draws_agree_with_the_exact_form_of_a_large_job() -> None:
    slices, hosts, lost, draws = 5, 20, 6, 4000
    stored = stored_by_job(Striped(2, 0), slices, hosts, leaves=8)
    random = Random(7)
    hits = sum(is_lost(stored, random.sample(range(slices * hosts), lost)) for _ in range(draws))
    exact = loss_probabilities(Striped(2), slices, hosts, lost)[lost]
    assert hits / draws == pytest.approx(exact, abs=4 * (exact / draws) ** 0.5)


@given(st.integers(1, 12), st.integers(1, 14))
def test_any_copies_but_one_of_the_slices_may_fail(slices: int, copies: int) -> None:
    assert slices_that_may_fail(Striped(copies), slices) == min(copies, slices) - 1


def test_without_the_primary_one_slice_less_may_fail() -> None:
    assert [slices_that_may_fail(AllButPrimary(), n) for n in (1, 2, 3, 8)] == [0, 1, 1, 6]


def test_job_of_thousands_of_hosts_has_an_answer() -> None:
    assert 0 < loss_probabilities(Striped(3), 100, 100, 8)[8] < 1e-5
    assert 0 < loss_probabilities(Striped(2), 2, 5000, 64)[64] < 1


@pytest.mark.parametrize("job", [(0, 1, 0), (1, 0, 0), (2, 2, 5), (2, 2, -1)])
def test_impossible_loss_is_refused(job: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        loss_probabilities(Striped(2), *job)
