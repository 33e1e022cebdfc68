"""The adaptive interval: when a save is due, and the best interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.save.timing import TierStatus
from emergency_ckpt.extras.pace import AdaptiveInterval, daly_interval_s

IDLE = TierStatus(False, True, 10.0, 0.1, 1.0, 0.5)


@pytest.mark.parametrize(
    ("rule", "status", "due"),
    [
        (AdaptiveInterval(mean_time_between_failures_s=1e4), IDLE, False),
        (
            AdaptiveInterval(mean_time_between_failures_s=1e4),
            IDLE._replace(has_saved=False),
            True,
        ),
        (
            AdaptiveInterval(mean_time_between_failures_s=1e4),
            IDLE._replace(since_last_s=46.0),
            True,
        ),
        (
            AdaptiveInterval(mean_time_between_failures_s=1e4),
            IDLE._replace(since_last_s=46.0, busy=True),
            False,
        ),
    ],
)
def test_due(rule: AdaptiveInterval, status: TierStatus, due: bool) -> None:
    assert rule.due(status) is due


def test_interval_is_dalys() -> None:
    # 100 (1 + 0.5 / 3 + 0.25 / 9); and saves that take longer than two failures are apart.
    assert daly_interval_s(50.0, 100.0) == pytest.approx(119.4444, rel=1e-6)
    assert daly_interval_s(250.0, 100.0) == 350.0
    policy = AdaptiveInterval(mean_time_between_failures_s=100.0, max_overhead=0.5)
    assert policy.interval_s(stall_s=0.0) == 0.0
    assert policy.interval_s(stall_s=200.0) == 400.0  # the bound on the overhead is stricter
    assert policy.interval_s(stall_s=0.01) == pytest.approx(math.sqrt(2.0), rel=1e-2)


@given(st.floats(600, 1e7), st.floats(1e-6, 3))
def test_adaptive_saving_goes_by_dalys_interval(mtbf_s: float, share: float) -> None:
    rule = AdaptiveInterval(mean_time_between_failures_s=mtbf_s, max_overhead=0.999)
    chosen_s = rule.interval_s(share * mtbf_s)
    assert chosen_s == pytest.approx(
        max(daly_interval_s(share * mtbf_s, mtbf_s), share * mtbf_s / 0.999)
    )


def test_overhead_is_bounded_and_a_save_is_waited_for() -> None:
    policy = AdaptiveInterval(mean_time_between_failures_s=100.0, max_overhead=0.01)
    assert policy.interval_s(stall_s=1.0) == 100.0
    assert policy.interval_s(stall_s=0.0, save_s=7.0) == 7.0


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1, 1e7), st.floats(0.001, 0.5))
def test_stalls_never_take_more_than_they_may(
    stall_s: float, save_s: float, mean_s: float, most: float
) -> None:
    policy = AdaptiveInterval(mean_time_between_failures_s=mean_s, max_overhead=most)
    interval_s = policy.interval_s(stall_s, save_s)
    assert stall_s <= most * interval_s * (1 + 1e-9)
    assert interval_s >= save_s


@pytest.mark.parametrize("settings", [(0, 0.1), (math.inf, 0.1), (10, 0), (10, 1)])
def test_senseless_settings_are_refused(settings: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        AdaptiveInterval(mean_time_between_failures_s=settings[0], max_overhead=settings[1])
