"""Retention: the steps of the persistent tier that may be removed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

NonFinite = Literal["off", "report"]
"""What a job does about values that are NaN or infinite: nothing, or say so."""


class StepRecord(NamedTuple):
    """A complete step. ``time_s``: Unix time of its save; ``metrics``: as given to ``save``."""

    step: int
    time_s: float
    metrics: Mapping[str, Any] | None = None


def metric_number(metric_of: Callable[[Any], Any], metrics: Any) -> float | None:
    """Return the number that ``metric_of`` makes of ``metrics``; None where it is not finite.

    JSON has neither NaN nor infinity, so the step log has null for both: where ``metric_of`` cannot
    calculate with null, there is no number either.
    """
    try:
        number = metric_of(metrics)
    except TypeError:
        if not _has_null(metrics):
            raise
        return None
    return number if number is not None and math.isfinite(number) else None


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_null, cast("Sequence[Any]", value)))
    return value is None


def wanted_by_fields(
    steps: Sequence[int], keep_last_n: int | None, keep_every_n_steps: int | None
) -> list[bool]:
    """Return True for the last ``keep_last_n`` and multiples of ``keep_every_n_steps``.

    ``keep_last_n`` None keeps all.
    """
    if keep_last_n is None:
        return [True] * len(steps)
    last = set(steps[-keep_last_n:]) if keep_last_n > 0 else set[int]()
    return [
        step in last or (keep_every_n_steps is not None and step % keep_every_n_steps == 0)
        for step in steps
    ]


def choose_removals(steps: Sequence[int], is_wanted: Sequence[bool]) -> tuple[int, ...]:
    """Return the unwanted steps, oldest first, but never the last complete one.

    ``steps``: the complete steps, oldest first. ``is_wanted``: the policy's answer for each;
    ValueError when it did not answer for each.
    """
    if len(is_wanted) != len(steps):
        raise ValueError(f"the policy answered for {len(is_wanted)} of {len(steps)} steps")
    newest = max(steps, default=None)
    unwanted = (step for step, want in zip(steps, is_wanted, strict=True) if not want)
    return tuple(sorted(step for step in unwanted if step != newest))
