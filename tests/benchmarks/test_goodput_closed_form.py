"""The closed forms: against each other, against the literature's, and against brute force."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.goodput.closed_form import (
    best_interval_s,
    expected_loss_of_intervals_s,
    expected_loss_s,
    goodput,
    loss_per_failure,
)
from emergency_ckpt.core.save.timing import AdaptiveInterval, daly_interval_s

mtbfs_s = st.floats(600, 1e7)
shares = st.floats(1e-9, 0.5)


def lambert_w(z: float) -> float:
    """Principal branch on [-1/e, 0): w e^w = z, by bisection; w e^w rises on [-1, 0]."""
    low, high = -1.0, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle * math.exp(middle) < z:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@given(mtbfs_s, shares)
def test_best_interval_has_the_highest_goodput(mtbf_s: float, share: float) -> None:
    cost_s = share * mtbf_s
    best_s = best_interval_s(cost_s, mtbf_s)
    assert best_s > cost_s
    highest = goodput(best_s, cost_s, mtbf_s)
    for factor in (0.3, 0.9, 0.99, 1.01, 1.1, 3.0):
        other_s = max(factor * best_s, cost_s)
        assert goodput(other_s, cost_s, mtbf_s) <= highest * (1 + 1e-12)


@given(mtbfs_s, st.floats(1e-3, 10))
def test_best_interval_is_lamberts_closed_form(mtbf_s: float, share: float) -> None:
    closed = mtbf_s * (1 + lambert_w(-math.exp(-share - 1)) + share)
    assert best_interval_s(share * mtbf_s, mtbf_s) == pytest.approx(closed, rel=1e-6)


@given(mtbfs_s, st.floats(1e-12, 1e-3))
def test_daly_interval_of_cheap_saves_is_the_best(mtbf_s: float, share: float) -> None:
    cost_s = share * mtbf_s
    best_s = best_interval_s(cost_s, mtbf_s)
    assert daly_interval_s(cost_s, mtbf_s) == pytest.approx(best_s, rel=share)


@given(mtbfs_s, st.floats(1e-6, 1.0))
def test_dalys_interval_is_worth_as_much_as_the_best(mtbf_s: float, share: float) -> None:
    cost_s = share * mtbf_s
    daly = goodput(daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s)
    assert daly == pytest.approx(goodput(best_interval_s(cost_s, mtbf_s), cost_s, mtbf_s), rel=1e-3)


@given(mtbfs_s, st.floats(1e-6, 3))
def test_adaptive_saving_goes_by_dalys_interval(mtbf_s: float, share: float) -> None:
    rule = AdaptiveInterval(mean_time_between_failures_s=mtbf_s, max_overhead=0.999)
    chosen_s = rule.interval_s(share * mtbf_s)
    assert chosen_s == pytest.approx(
        max(daly_interval_s(share * mtbf_s, mtbf_s), share * mtbf_s / 0.999)
    )


def test_daly_gives_up_on_saves_that_take_longer_than_a_failure() -> None:
    assert daly_interval_s(250.0, 100.0) == 350.0
    assert best_interval_s(0.0, 100.0) == 0.0


@given(mtbfs_s, shares, st.floats(0.01, 3), st.floats(0, 1))
def test_goodput_is_that_of_the_literature(
    mtbf_s: float, cost: float, work: float, recovery: float
) -> None:
    """Expected time E = (1/l + D) e^(lR) (e^(l(W+C)) - 1) of Bougeret et al. 2011, with D = 0."""
    rate, work_s, cost_s, recovery_s = (
        1 / mtbf_s, work * mtbf_s, cost * mtbf_s, recovery * mtbf_s
    )  # fmt: skip
    time_s = math.exp(rate * recovery_s) / rate * math.expm1(rate * (work_s + cost_s))
    assert goodput(work_s + cost_s, cost_s, mtbf_s, recovery_s=recovery_s) == pytest.approx(
        work_s / time_s
    )


@given(mtbfs_s, st.floats(1e-6, 1e-3), st.floats(0, 1e-2), st.floats(0, 1e-2))
def test_waste_is_what_goodput_lacks_to_first_order(
    mtbf_s: float, cost: float, publish: float, recovery: float
) -> None:
    cost_s = cost * mtbf_s
    times = {"publish_s": publish * mtbf_s, "recovery_s": recovery * mtbf_s}
    interval_s = math.sqrt(2 * cost_s * mtbf_s)
    waste = cost_s / interval_s + (interval_s / 2 + sum(times.values())) / mtbf_s
    assert abs(1 - goodput(interval_s, cost_s, mtbf_s, **times) - waste) <= waste**2


@given(mtbfs_s, st.floats(1e-9, 20), st.floats(0, 5))
def test_loss_lies_between_nothing_and_all(mtbf_s: float, interval: float, publish: float) -> None:
    interval_s, publish_s = interval * mtbf_s, publish * mtbf_s
    loss_s = expected_loss_s(interval_s, mtbf_s, publish_s=publish_s)
    assert 0 < loss_s <= mtbf_s * (1 + 1e-12)
    assert loss_s <= expected_loss_s(interval_s, publish_s=publish_s) * (1 + 1e-9)


@given(mtbfs_s, st.floats(1e-12, 1e-5), st.floats(0, 1e-5))
def test_loss_at_rare_failures_is_half_interval_and_publishing(
    mtbf_s: float, interval: float, publish: float
) -> None:
    interval_s, publish_s = interval * mtbf_s, publish * mtbf_s
    rare_s = expected_loss_s(interval_s, publish_s=publish_s)
    assert rare_s == interval_s / 2 + publish_s
    assert expected_loss_s(interval_s, mtbf_s, publish_s=publish_s) == pytest.approx(
        rare_s, rel=2e-5
    )


@given(mtbfs_s, st.floats(0.005, 0.02), st.floats(0, 0.1))
def test_series_and_formula_agree_where_they_meet(
    mtbf_s: float, interval: float, publish: float
) -> None:
    interval_s, publish_s = interval * mtbf_s, publish * mtbf_s
    formula_s = mtbf_s - math.exp(-publish) * interval_s / math.expm1(interval)
    assert expected_loss_s(interval_s, mtbf_s, publish_s=publish_s) == pytest.approx(formula_s)


@given(mtbfs_s, st.floats(1e-3, 3), st.floats(0, 1), st.floats(0, 1))
def test_time_is_work_stalls_losses_and_recoveries(
    mtbf_s: float, interval: float, publish: float, cost: float
) -> None:
    """Between two failures: kept intervals and what was lost make up M, whatever the interval."""
    interval_s, publish_s = interval * mtbf_s, publish * mtbf_s
    cost_s = cost * interval_s
    kept = goodput(interval_s, cost_s, mtbf_s, publish_s=publish_s)
    kept_intervals_s = math.exp(-publish) * interval_s / math.expm1(interval)
    stalled = kept_intervals_s * cost / mtbf_s
    lost = expected_loss_s(interval_s, mtbf_s, publish_s=publish_s) / mtbf_s
    assert kept + stalled + lost == pytest.approx(1)


def test_loss_of_drawn_failures() -> None:
    mtbf_s, interval_s, publish_s, draws = 1000.0, 300.0, 120.0, 200_000
    rng = random.Random(5)
    total_s = 0.0
    for _ in range(draws):
        failure_s = rng.expovariate(1 / mtbf_s)
        whole = max(0, math.floor((failure_s - publish_s) / interval_s))
        total_s += failure_s - whole * interval_s
    # Standard deviation of one loss is below interval + publish.
    assert total_s / draws == pytest.approx(
        expected_loss_s(interval_s, mtbf_s, publish_s=publish_s),
        abs=4 * (interval_s + publish_s) / math.sqrt(draws),
    )


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=50), st.floats(0, 100))
def test_unequal_intervals_lose_more_than_equal_ones(
    intervals_s: list[float], publish_s: float
) -> None:
    mean_s = sum(intervals_s) / len(intervals_s)
    loss_s = expected_loss_of_intervals_s(intervals_s, publish_s)
    assert loss_s >= (mean_s / 2 + publish_s) * (1 - 1e-12)
    assert loss_s <= (max(intervals_s) / 2 + publish_s) * (1 + 1e-12)


def test_failure_finds_long_intervals_more_often() -> None:
    # In (10, 30) three quarters of the failures fall into the long one: 3/4 15 + 1/4 5.
    assert expected_loss_of_intervals_s([10, 30], 2) == pytest.approx(12.5 + 2)
    assert expected_loss_of_intervals_s([20, 20, 20]) == expected_loss_s(20)


def test_loss_in_steps_and_chip_hours() -> None:
    loss = loss_per_failure(interval_s=100, step_s=2, chips=3600, mtbf_s=math.inf, publish_s=10)
    assert loss == (60, 30, 60)


def test_hopeless_jobs_do_not_overflow() -> None:
    assert goodput(1e9, 1.0, 1.0) == 0
    assert expected_loss_s(1e9, 1.0) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_interval_s(-1, 10), "cost_s"),
        (lambda: best_interval_s(1, 0), "mtbf_s"),
        (lambda: goodput(10, 11, 100), "does not fit"),
        (lambda: goodput(10, 1, 100, recovery_s=math.inf), "recovery_s"),
        (lambda: expected_loss_s(0), "interval_s"),
        (lambda: expected_loss_of_intervals_s([]), "no interval"),
        (lambda: loss_per_failure(1, 1, 0, 10), "chips"),
    ],
)
def test_numbers_that_are_no_times_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
