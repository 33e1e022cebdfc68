"""Threads that copy and check, by cores and by what one of them does."""

from __future__ import annotations

import pytest

from emergency_ckpt.background import threads_for


@pytest.mark.parametrize(
    ("cores", "one_gb_s", "threads"),
    [
        (1, 10.0, 1),
        (2, 10.0, 2),
        (11, 1.0, 2),
        (16, 8.7, 4),
        (64, 8.7, 7),
        (208, 8.7, 7),
        (208, 3.0, 20),
        (208, 60.0, 2),
        (208, 0.001, 52),
    ],
)
def test_threads_follow_from_cores_and_rate(cores: int, one_gb_s: float, threads: int) -> None:
    assert threads_for(cores, lambda: one_gb_s) == threads


def test_rate_is_not_measured_where_it_does_not_matter() -> None:
    def measure() -> float:
        raise AssertionError("measured")

    assert threads_for(8, measure) == 2
