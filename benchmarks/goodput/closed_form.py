"""The cost of checkpointing and failures: best intervals, goodput, loss per failure.

The model. Training alternates between ``interval - cost`` seconds of work and a save that stalls
it for ``cost`` seconds. The save then continues in the background and is complete ``publish``
seconds later; until then a failure returns training to the previous save. Failures are memoryless
with mean time ``mtbf`` between them. After each failure the job needs ``recovery`` seconds (detect,
start, restore). A failure during recovery starts the recovery again. All times are wall times in
seconds.

Source: Bougeret, Casanova, Rabie, Robert, Vivien: Checkpointing strategies for parallel jobs,
SC 2011: the expected time of work under exponential failures, E = M e^(R/M) (e^((W+C)/M) - 1).
This model adds ``publish``: in theirs, a save is complete when training continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_SERIES_BELOW = 1e-2
_NEWTON_STEPS = 100


class Loss(NamedTuple):
    """The training that is lost by one failure and has to be repeated."""

    seconds: float
    steps: float
    chip_hours: float


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval with the highest ``goodput``, exactly.

    The root x = T/M of x - (1 - e^-x) = C/M, which in closed form is M (1 + W(-e^(-C/M - 1))) + C
    with Lambert's W (Bougeret et al. 2011). It depends neither on publishing nor on recovery, but
    an interval must not be shorter than a save. 0 when saving costs nothing.
    """
    _require(cost_s=cost_s)
    _require_positive(mtbf_s=mtbf_s)
    wanted = cost_s / mtbf_s
    if wanted == 0:
        return 0.0
    # The function is convex and rises, so Newton's steps come down to the root from the right.
    x = math.sqrt(2 * wanted)
    for _ in range(_NEWTON_STEPS):
        step = (_shortfall(x) - wanted) / -math.expm1(-x)
        x -= step
        if abs(step) <= 1e-14 * x:
            break
    return x * mtbf_s


def goodput(
    interval_s: float,
    cost_s: float,
    mtbf_s: float,
    *,
    publish_s: float = 0.0,
    recovery_s: float = 0.0,
) -> float:
    """Return the share of the time that is spent on work that is kept, exactly: 0 to 1.

    e^(-(publish + recovery)/M) (T - C) / (M (e^(T/M) - 1)). Between two failures there are on
    average e^(-publish/M) / (e^(T/M) - 1) saves that complete, each with T - C of work, and it
    takes M e^(recovery/M) from one start of training to the next. With ``publish_s`` 0 it is
    W/E of Bougeret et al. 2011.
    """
    _require_save(interval_s, cost_s)
    _require(publish_s=publish_s, recovery_s=recovery_s)
    _require_positive(mtbf_s=mtbf_s)
    work_s = interval_s - cost_s
    return math.exp(-(publish_s + recovery_s) / mtbf_s) * work_s / _growth_s(interval_s, mtbf_s)


def expected_loss_s(
    interval_s: float, mtbf_s: float = math.inf, *, publish_s: float = 0.0
) -> float:
    """Return the mean training time that a failure loses.

    M - T e^(-publish/M) / (e^(T/M) - 1), which is T/2 + publish for rare failures and for infinite
    ``mtbf_s``. A life that fails early has less to lose, so the result is never more than that, nor
    more than ``mtbf_s``.
    """
    _require_positive(interval_s=interval_s)
    _require(publish_s=publish_s)
    if math.isinf(mtbf_s):
        return interval_s / 2 + publish_s
    _require_positive(mtbf_s=mtbf_s)
    x, y = interval_s / mtbf_s, publish_s / mtbf_s
    if x < _SERIES_BELOW:  # x/(e^x - 1) by its series: the difference below would cancel
        gone = x / 2 - x**2 / 12 + x**4 / 720
        return mtbf_s * (-math.expm1(-y) + math.exp(-y) * gone)
    return mtbf_s - math.exp(-y) * interval_s / _exp_minus_1(x)


def expected_loss_of_intervals_s(intervals_s: Sequence[float], publish_s: float = 0.0) -> float:
    """Return the mean loss of a rare failure for measured intervals of different lengths.

    sum(T^2) / (2 sum(T)) + publish: a failure is more likely in a long interval than in a short
    one, so half of the mean interval would be too small.
    """
    if not intervals_s:
        raise ValueError("no interval was given")
    for interval_s in intervals_s:
        _require_positive(interval_s=interval_s)
    _require(publish_s=publish_s)
    total_s = math.fsum(intervals_s)
    return math.fsum(t * t for t in intervals_s) / (2 * total_s) + publish_s


def loss_per_failure(
    interval_s: float, step_s: float, chips: int, mtbf_s: float, *, publish_s: float = 0.0
) -> Loss:
    """Return ``expected_loss_s`` in seconds, steps and chip hours."""
    _require_positive(step_s=step_s, chips=chips)
    seconds = expected_loss_s(interval_s, mtbf_s, publish_s=publish_s)
    return Loss(seconds, seconds / step_s, seconds * chips / 3600)


def _shortfall(x: float) -> float:
    """Return x - (1 - e^-x), without loss of digits near 0."""
    if x < _SERIES_BELOW:
        return x**2 * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x / 720))))
    return x + math.expm1(-x)


def _growth_s(interval_s: float, mtbf_s: float) -> float:
    """Return M (e^(T/M) - 1)."""
    return mtbf_s * _exp_minus_1(interval_s / mtbf_s)


def _exp_minus_1(x: float) -> float:
    return math.inf if x > 700 else math.expm1(x)  # no job gets a save done: not an overflow


def _require_save(interval_s: float, cost_s: float) -> None:
    _require_positive(interval_s=interval_s)
    _require(cost_s=cost_s)
    if cost_s > interval_s:
        raise ValueError(f"a save of {cost_s} s does not fit in an interval of {interval_s} s")


def _require(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, 0 or more, got {value}")


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value}")
