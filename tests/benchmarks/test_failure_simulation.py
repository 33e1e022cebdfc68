"""The simulation: its books balance, and where there is a closed form it agrees with it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.goodput.closed_form import goodput
from benchmarks.goodput.failure_simulation import (
    Design,
    FailingJob,
    Kind,
    RamRule,
    TierCosts,
    simulate,
)

STORAGE = TierCosts(interval_s=3600, cost_s=1, publish_s=200, restore_s=300)
ANY_SHARD = RamRule(frozenset({0, 1}), any_shard=True, rebuilds=True)
ONE_SLICE = RamRule(frozenset({1}), any_shard=False, rebuilds=False)
ALL_KINDS: tuple[tuple[Kind, float], ...] = (("process", 2), ("host", 7), ("slice", 1))

tiers = st.builds(
    TierCosts,
    interval_s=st.floats(10, 5000),
    cost_s=st.floats(0, 3),
    publish_s=st.floats(0, 3000),
    restore_s=st.floats(0, 3000),
)
jobs = st.builds(
    FailingJob,
    slices=st.integers(1, 5),
    hosts_per_slice=st.integers(1, 4),
    mtbf_s=st.floats(100, 20_000),
    shares=st.just(ALL_KINDS),
    down_s=st.floats(0, 1000),
)


def job(**changed: object) -> FailingJob:
    usual = FailingJob(2, 4, mtbf_s=3600, shares=ALL_KINDS, down_s=60)
    return dataclasses.replace(usual, **changed)


@settings(max_examples=60, deadline=None)
@given(tiers, st.none() | tiers, jobs, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_every_second_is_accounted_for(
    persistent: TierCosts,
    local: TierCosts | None,
    failing: FailingJob,
    any_shard: bool,
    rebuilds: bool,
    seed: int,
) -> None:
    slices = frozenset(range(failing.slices))
    rule = None if local is None else RamRule(slices, any_shard, rebuilds)
    design = Design("any", persistent, local, rule)
    outcome = simulate(design, failing, duration_s=200_000, seed=seed)
    parts_s = (outcome.kept_s, outcome.stalled_s, outcome.lost_s, outcome.recovering_s)
    assert min(parts_s) >= 0
    assert sum(parts_s) == pytest.approx(outcome.elapsed_s)
    assert outcome.elapsed_s == pytest.approx(200_000)
    # A failure during recovery has no restore of its own.
    assert outcome.ram_restores + outcome.persistent_restores <= outcome.failures
    assert outcome.ram_restores == 0 or local is not None


@pytest.mark.parametrize(
    ("costs", "mtbf_s", "down_s"),
    [
        (TierCosts(600, 60, 0, 300), 10_000, 0),  # blocking saves, as in the literature
        (TierCosts(600, 5, 300, 120), 3000, 60),
        (TierCosts(2000, 100, 500, 900), 2000, 300),  # failures during recovery are common
    ],
)
def test_storage_only_agrees_with_the_closed_form(
    costs: TierCosts, mtbf_s: float, down_s: float
) -> None:
    failing = job(mtbf_s=mtbf_s, down_s=down_s)
    found = simulate(Design("storage", costs), failing, duration_s=20_000 * mtbf_s, seed=3)
    closed = goodput(
        costs.interval_s,
        costs.cost_s,
        mtbf_s,
        publish_s=costs.publish_s,
        recovery_s=down_s + costs.restore_s,
    )
    assert found.goodput == pytest.approx(closed, rel=0.02)
    assert found.ram_restores == 0


def _share_of_losses(rule: RamRule, slices: int, hosts: int, failures: int) -> float:
    everyone = list(itertools.product(range(slices), range(hosts)))
    draws = list(itertools.combinations(everyone, failures))
    return sum(not rule.survives(frozenset(lost)) for lost in draws) / len(draws)


def _spared(slices: int, hosts: int, failures: int) -> float:
    """With all slices but one as whole copies: when each is hit, by inclusion and exclusion."""
    spared = sum(
        (-1) ** k * math.comb(slices - 1, k) * math.comb((slices - k) * hosts, failures)
        for k in range(slices)
    )
    return spared / math.comb(slices * hosts, failures)


def _both_copies(slices: int, hosts: int, failures: int) -> float:
    """With a copy at the same position of two slices: unless no position is hit twice."""
    spared = math.comb(hosts, failures) * 2**failures
    return 1 - spared / math.comb(slices * hosts, failures)


@pytest.mark.parametrize(
    ("rule", "slices", "hosts", "closed"),
    [
        (ONE_SLICE, 2, 5, _spared),
        (RamRule(frozenset({1, 2, 3}), any_shard=False, rebuilds=False), 4, 3, _spared),
        (ANY_SHARD, 2, 6, _both_copies),
    ],
)
def test_share_of_failures_that_lose_ram_is_the_closed_form(
    rule: RamRule, slices: int, hosts: int, closed: Callable[[int, int, int], float]
) -> None:
    for failures in (1, 2, 3, 4):
        found = _share_of_losses(rule, slices, hosts, failures)
        assert found == pytest.approx(closed(slices, hosts, failures))


def test_copies_not_made_again_are_missed_at_next_failure() -> None:
    """One host of each slice, one after the other, long before the next save."""
    slow = TierCosts(interval_s=3000, cost_s=0, publish_s=0, restore_s=1)
    rare = dataclasses.replace(STORAGE, interval_s=100_000)
    only_hosts: tuple[tuple[Kind, float], ...] = (("host", 1.0),)
    failing = job(shares=only_hosts, mtbf_s=2000, hosts_per_slice=1, slices=3)
    restores = {}
    for rebuilds in (True, False):
        rule = RamRule(frozenset({0, 1, 2}), any_shard=True, rebuilds=rebuilds)
        design = Design("any", rare, slow, rule)
        restores[rebuilds] = simulate(design, failing, duration_s=2e7, seed=8)
    assert restores[False].persistent_restores > 2 * restores[True].persistent_restores
