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
    expected_waste,
    ram_loss_probability,
    simulate,
)

STORAGE = TierCosts(interval_s=3600, cost_s=1, publish_s=200, restore_s=300)
RAM = TierCosts(interval_s=60, cost_s=0.5, publish_s=5, restore_s=10)
ANY_SHARD = RamRule(frozenset({0, 1}), any_shard=True, rebuilds=True)
ONE_SLICE = RamRule(frozenset({1}), any_shard=False, rebuilds=False)
ALL_KINDS: tuple[tuple[Kind, float], ...] = (("process", 2), ("host", 7), ("slice", 1))
ONLY_PROCESSES: tuple[tuple[Kind, float], ...] = (("process", 1),)

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


def test_seed_decides() -> None:
    design = Design("ours", STORAGE, RAM, ANY_SHARD)
    first, again, other = (simulate(design, job(), duration_s=1e6, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


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


def test_ram_that_is_never_lost_agrees_with_the_closed_form() -> None:
    design = Design("ours", dataclasses.replace(STORAGE, cost_s=0), RAM, ANY_SHARD)
    failing = job(shares=ONLY_PROCESSES, mtbf_s=1000)
    found = simulate(design, failing, duration_s=2e7, seed=4)
    closed = goodput(RAM.interval_s, RAM.cost_s, 1000, publish_s=RAM.publish_s, recovery_s=70)
    assert found.goodput == pytest.approx(closed, rel=0.01)
    # Only what fails before the first save of all has to go back to storage.
    assert found.persistent_restores <= 1


@pytest.mark.parametrize("rule", [ANY_SHARD, ONE_SLICE])
def test_waste_agrees_with_first_order_when_failures_are_rare(rule: RamRule) -> None:
    failing = job(mtbf_s=200_000)
    design = Design("any", STORAGE, RAM, rule)
    found = simulate(design, failing, duration_s=2000 * failing.mtbf_s, seed=6)
    assert 1 - found.goodput == pytest.approx(expected_waste(design, failing), rel=0.05)


def test_waste_without_a_local_tier() -> None:
    design = Design("storage", STORAGE)
    waste = 1 / 3600 + (60 + 300 + 1800 + 200) / 3600
    assert expected_waste(design, job()) == pytest.approx(waste)


def test_one_failure_loses_half_of_the_time_if_one_slice_stores() -> None:
    # Of two slices, where slice 1 has the only copy, half of the hosts are in it.
    assert ram_loss_probability(ONE_SLICE, job()) == pytest.approx(0.8 / 2)
    assert ram_loss_probability(ANY_SHARD, job()) == 0
    two = RamRule(frozenset({1, 2}), any_shard=False, rebuilds=False)
    assert ram_loss_probability(two, job(slices=3)) == 0


def test_restores_follow_the_probability_of_losing_ram() -> None:
    design = Design("one slice", STORAGE, dataclasses.replace(RAM, interval_s=10), ONE_SLICE)
    failing = job(mtbf_s=50_000)
    found = simulate(design, failing, duration_s=4000 * failing.mtbf_s, seed=7)
    share = found.persistent_restores / (found.ram_restores + found.persistent_restores)
    assert share == pytest.approx(ram_loss_probability(ONE_SLICE, failing), abs=0.03)


def _share_of_losses(rule: RamRule, slices: int, hosts: int, failures: int) -> float:
    everyone = list(itertools.product(range(slices), range(hosts)))
    draws = list(itertools.combinations(everyone, failures))
    return sum(not rule.survives(frozenset(lost)) for lost in draws) / len(draws)


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_losing_the_only_slice_that_stores(failures: int) -> None:
    """With two slices and one copy: unless all failures hit the other slice."""
    closed = 1 - math.comb(5, failures) / math.comb(10, failures)
    assert _share_of_losses(ONE_SLICE, 2, 5, failures) == pytest.approx(closed)


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_losing_every_slice_that_stores(failures: int) -> None:
    """With n - 1 whole copies: when each of them is hit, by inclusion and exclusion."""
    slices, hosts = 4, 3
    rule = RamRule(frozenset(range(1, slices)), any_shard=False, rebuilds=False)
    spared = sum(
        (-1) ** k * math.comb(slices - 1, k) * math.comb((slices - k) * hosts, failures)
        for k in range(slices)
    )
    closed = spared / math.comb(slices * hosts, failures)
    assert _share_of_losses(rule, slices, hosts, failures) == pytest.approx(closed)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_losing_both_copies_of_a_shard(failures: int) -> None:
    """With two copies at the same position: unless no position is hit twice."""
    hosts = 6
    closed = 1 - math.comb(hosts, failures) * 2**failures / math.comb(2 * hosts, failures)
    assert _share_of_losses(ANY_SHARD, 2, hosts, failures) == pytest.approx(closed)


def test_any_shard_from_any_peer_survives_more_than_whole_slices() -> None:
    lost = {(0, 0), (1, 1)}
    slices = frozenset({0, 1})
    assert RamRule(slices, any_shard=True, rebuilds=True).survives(lost)
    assert not RamRule(slices, any_shard=False, rebuilds=True).survives(lost)


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


def test_job_that_never_fails_only_stalls() -> None:
    design = Design("storage", STORAGE)
    outcome = simulate(design, job(mtbf_s=1e15), duration_s=1e6, seed=9)
    assert outcome.failures == 0
    assert outcome.goodput == pytest.approx(1 - 1 / 3600)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TierCosts(0, 0, 0, 0), "must be finite times"),
        (lambda: TierCosts(1, 2, 0, 0), "do not fit"),
        (lambda: Design("x", STORAGE, RAM), "needs costs and a rule"),
        (lambda: Design("x", TierCosts(1, 1, 0, 0)), "no time to train"),
        (lambda: job(slices=0), "at least one slice"),
        (lambda: job(mtbf_s=0), "mtbf_s"),
        (lambda: job(shares=()), "shares"),
        (lambda: simulate(Design("x", STORAGE), job(), duration_s=0, seed=0), "duration_s"),
    ],
)
def test_what_cannot_be_simulated_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
