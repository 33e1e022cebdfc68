"""Faults of policy objects, found before training: Orbax's own accept any value."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from emergency_ckpt.config.policies import parts_of
from emergency_ckpt.config.table import LONGEST_TIME_S, is_complete
from emergency_ckpt.core.save.timing import AdaptiveInterval

_Check = Callable[[Any], bool]
_LONGEST_TIME = datetime.timedelta(seconds=LONGEST_TIME_S)
_SAVE_EVERY = "a whole number of steps from 0 on, a datetime.timedelta, a policy, or a list of them"


def save_problems(name: str, every: object) -> list[str]:
    """Return the faults of the setting ``name``, a ``SaveEvery``; empty when it has none."""
    problems: list[str] = []
    for part in parts_of(every):
        if isinstance(part, datetime.timedelta):
            if not datetime.timedelta() < part < _LONGEST_TIME:
                problems.append(f"{name} must be a positive time, not {part}")
        elif part is None or isinstance(part, int | float | str):
            if not is_complete(part, 0):
                problems.append(f"{name} must be {_SAVE_EVERY}, not {part!r}")
        elif isinstance(part, AdaptiveInterval):
            problems += _field_problems(name, part)
        else:
            problems += _object_problems(name, part, "should_save") or _field_problems(name, part)
    return problems


def preservation_policy_problems(name: str, policy: object | None) -> list[str]:
    """Return the faults of a preservation policy; empty when it has none."""
    if policy is None:
        return []
    if problems := _object_problems(name, policy, "should_preserve"):
        return problems
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    if type(policy) is ocm.AnyPreservationPolicy and _is_sequence(policy.policies):
        parts: Sequence[object] = policy.policies
        return [line for part in parts for line in preservation_policy_problems(name, part)]
    return _field_problems(name, policy)


def _field_problems(name: str, policy: object) -> list[str]:
    problems: list[str] = []
    # By exact type: a subclass may give a field another meaning.
    for field, is_right, wanted in _fields().get(type(policy), ()):
        value = getattr(policy, field)
        if not is_right(value):
            problems.append(
                f"{name}: {field} of {type(policy).__name__} must be {wanted}, not {value!r}"
            )
    return problems


def _object_problems(name: str, policy: object, method: str) -> list[str]:
    if isinstance(policy, type):
        return [f"{name}: {policy.__name__} is a class: give one of it"]
    return (
        [] if callable(getattr(policy, method, None)) else [f"{name}: {policy!r} has no {method}"]
    )


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_time(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(cast("float", value)) and cast("float", value) >= 0


def _is_duration(value: object) -> bool:
    return isinstance(value, datetime.timedelta)


def _has_steps(value: object) -> bool:
    if isinstance(value, str | bytes):
        return False
    try:
        return (0 in cast("Any", value)) in (True, False)
    except TypeError:
        return False


def _optional(check: _Check) -> _Check:
    def check_given(value: Any) -> bool:
        return value is None or check(value)

    return check_given


_INTERVAL = (partial(is_complete, least=1), "a whole number of at least 1")
_COUNT = (_optional(partial(is_complete, least=0)), "None or a whole number from 0 on")
_SECONDS = (_is_time, "a number of seconds")


@functools.cache
def _fields() -> dict[type, tuple[tuple[str, _Check, str], ...]]:
    """Return the checks of each policy's fields: name, check, and what is wanted."""
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    return {
        ocm.AnySavePolicy: (("policies", _is_sequence, "a list of policies"),),
        ocm.FixedIntervalPolicy: (("interval", *_INTERVAL),),
        ocm.SpecificStepsPolicy: (("steps", _has_steps, "a collection of steps"),),
        ocm.ContinuousCheckpointingPolicy: (
            ("minimum_interval_secs", _optional(_is_time), "None or a number of seconds"),
        ),
        ocm.AnyPreservationPolicy: (("policies", _is_sequence, "a list of policies"),),
        ocm.LatestN: (("n", *_COUNT),),
        ocm.BestN: (("n", *_COUNT), ("get_metric_fn", callable, "a function")),
        ocm.EveryNSeconds: (("interval_secs", *_SECONDS),),
        ocm.EveryNSteps: (("interval_steps", *_INTERVAL), ("max_to_keep", *_COUNT)),
        ocm.EveryNStepsClosest: (("interval_steps", *_INTERVAL), ("max_to_keep", *_COUNT)),
        ocm.LatestDuration: (("duration", _is_duration, "a timedelta"),),
    }
