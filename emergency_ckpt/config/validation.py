"""Every fault of a config, all of them at once, in words for the user.

A value alone is judged by its row of the table, what rows cannot say by the rules here. A rule is
left out where a value that it looks at is at fault by its row.
"""

from __future__ import annotations

import datetime
import functools
import math
import numbers
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from emergency_ckpt.config.policies import parts_of
from emergency_ckpt.config.table import LONGEST_TIME_S, is_whole_number, settings_table
from emergency_ckpt.core.limits import NAME_PATTERN
from emergency_ckpt.core.placement import PlacementPolicy
from emergency_ckpt.core.save.timing import TimingRule
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extensions import extension_of
from emergency_ckpt.observer import Observer, OnEvent
from emergency_ckpt.paths import dir_problems, local_dir_problems
from emergency_ckpt.run_secret import own_secret

_LONGEST_TIME = datetime.timedelta(seconds=LONGEST_TIME_S)
_SAVE_EVERY = "a whole number of steps from 0 on, a datetime.timedelta, a policy, or a list of them"

_Check = Callable[[Any], bool]


def config_problems(config: Any) -> list[str]:
    """Return a line for each fault of ``config``: a ``Config`` whose values are of any type."""
    values = {row: getattr(config, row.name) for row in settings_table(type(config))}
    faults = {row.name: line for row, value in values.items() if (line := row.problem(value))}
    lines = list(faults.values())
    for row, value in values.items():
        is_alone = row.needs and getattr(config, row.needs) is None
        if is_alone and row.name not in faults and row.asks_for_something(value):
            lines.append(f"{row.name} is set, but {row.needs} is not")

    def is_sound(*names: str) -> bool:
        return not faults.keys() & set(names)

    lines += _rule_problems(config, is_sound)
    return lines


def _rule_problems(config: Any, is_sound: Callable[..., bool]) -> Iterator[str]:
    """Yield what the rows do not find. ``is_sound(*names)``: they have found no fault in these."""
    if is_sound("local_dir"):
        yield from local_dir_problems(config.local_dir)
    if is_sound("dir", "run_id") and config.dir is None and config.run_id is None:
        yield "neither dir nor run_id is set: nothing names the run"
    if is_sound("run_id") and not (config.run_id is None or NAME_PATTERN.fullmatch(config.run_id)):
        yield f"run_id {config.run_id!r} may only have letters, digits, '.', '_' and '-'"
    if is_sound("dir") and config.dir is not None:
        yield from dir_problems(config.dir)
    yield from _on_event_problems(config.on_event)
    if is_sound("dir", "local_dir") and config.dir is not None and config.local_dir:
        yield from _nested_problems(config.dir, config.local_dir)
    is_policy_set = config.preservation_policy is not None
    if is_sound("keep_last_n") and is_policy_set and config.keep_last_n is not None:
        yield "preservation_policy and keep_last_n are both set"
    for name in ("local_save_every", "save_every"):
        yield from save_problems(name, getattr(config, name))
    yield from preservation_policy_problems(config.preservation_policy)
    placement = config.placement
    if not isinstance(placement, PlacementPolicy) or isinstance(placement, type):
        expected = "'all_but_primary', 'striped(<copies>)' or a policy"
        yield f"placement must be {expected}, not {placement!r}"
    if is_sound("require", "dir") and "storage" in config.require and config.dir is None:
        yield "require has 'storage', but dir is not set"
    if is_sound("require", "secret_file") and "secret" in config.require:
        yield from _secret_problems(config.secret_file)
    yield from _mesh_problems(config.mesh, config.replica_axis)


def listeners_of(on_event: object) -> list[Any]:
    """Return the parts of ``on_event``: none, one, or those of a list."""
    if on_event is None:
        return []
    return list(cast("Sequence[object]", on_event)) if _is_sequence(on_event) else [on_event]


def made_observer(listener: OnEvent) -> Callable[[Event], None]:
    """Return the listener, which a text names. ConfigError: the text names none."""
    if not isinstance(listener, str):
        return listener
    observer = extension_of("on_event", listener)
    if not isinstance(observer, Observer):
        raise ConfigError([f"on_event: {listener!r} is an extra, but no observer"])
    return observer


def _on_event_problems(on_event: object) -> Iterator[str]:
    for listener in listeners_of(on_event):
        if isinstance(listener, str):
            try:
                made_observer(listener)
            except ConfigError as error:
                yield from error.problems
        elif isinstance(listener, type) or not callable(listener):
            yield f"on_event: {listener!r} is neither a function nor an observer"


def _nested_problems(directory: str, local_dir: str) -> Iterator[str]:
    """Neither tier may lie inside the other: what removes the one would take the other along."""
    if not Path(directory).is_absolute():
        return
    # Not by realpath: it would wait for a file server that is down.
    stored, local = Path(os.path.abspath(directory)), Path(os.path.abspath(local_dir))
    if stored.is_relative_to(local):
        yield f"dir {directory!r} lies inside local_dir {local_dir!r}: it would be lost with RAM"
    elif local.is_relative_to(stored):
        yield f"local_dir {local_dir!r} lies inside dir {directory!r}: set one beside it"


def _secret_problems(secret_file: str | None) -> Iterator[str]:
    try:
        secret = own_secret(secret_file, os.environ)
    except ConfigError as error:
        yield from error.problems
        return
    if secret is None:
        yield "require has 'secret', but neither secret_file nor ECKPT_SECRET gives a secret"


def _mesh_problems(mesh: object, axis: object) -> Iterator[str]:
    if isinstance(axis, bool) or not isinstance(axis, str | int | None):
        yield f"replica_axis must be the name or the number of an axis, not {axis!r}"
    elif not isinstance(mesh, jax.sharding.Mesh | None):
        yield f"mesh must be a jax.sharding.Mesh, not {mesh!r}"
    elif mesh is not None:
        axes = mesh.axis_names
        if isinstance(axis, str) and axis not in axes:
            yield f"replica_axis {axis!r} is not one of the mesh's axes {axes}"
        if isinstance(axis, int) and not 0 <= axis < len(axes):
            yield f"replica_axis {axis} is out of range for the mesh's axes {axes}"


def save_problems(name: str, every: object) -> Iterator[str]:
    """Yield the faults of the setting ``name``, a ``SaveEvery``."""
    for part in parts_of(every):
        if isinstance(part, datetime.timedelta):
            if not datetime.timedelta() < part < _LONGEST_TIME:
                yield f"{name} must be a positive time, not {part}"
        elif part is None or isinstance(part, numbers.Number | str):
            if not is_whole_number(part, 0):
                yield f"{name} must be {_SAVE_EVERY}, not {part!r}"
        elif isinstance(part, type) or not isinstance(part, TimingRule):
            yield from _policy_problems(name, part, "should_save")


def preservation_policy_problems(policy: object | None) -> Iterator[str]:
    """Yield the faults of ``preservation_policy``."""
    if policy is None:
        return
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    if type(policy) is ocm.AnyPreservationPolicy and _is_sequence(policy.policies):
        for part in policy.policies:
            yield from preservation_policy_problems(part)
        return
    yield from _policy_problems("preservation_policy", policy, "should_preserve")


def _policy_problems(name: str, policy: object, method: str) -> Iterator[str]:
    """Yield the faults of a policy, which must have ``method``, and of its fields."""
    if isinstance(policy, type):
        yield f"{name}: {policy.__name__} is a class: give one of it"
        return
    if not callable(getattr(policy, method, None)):
        yield f"{name}: {policy!r} has no {method}"
        return
    # By exact type: a subclass may give a field another meaning.
    for field, is_right, expected in _fields().get(type(policy), ()):
        value = getattr(policy, field)
        if not is_right(value):
            yield f"{name}: {field} of {type(policy).__name__} must be {expected}, not {value!r}"


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
    except Exception:  # noqa: BLE001 - the user's code, which may be no collection
        return False


def _optional(check: _Check) -> _Check:
    def check_given(value: Any) -> bool:
        return value is None or check(value)

    return check_given


_INTERVAL = (partial(is_whole_number, least=1), "a whole number of at least 1")
_COUNT = (_optional(partial(is_whole_number, least=0)), "None or a whole number from 0 on")


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
        ocm.EveryNSeconds: (("interval_secs", _is_time, "a number of seconds"),),
        ocm.EveryNSteps: (("interval_steps", *_INTERVAL), ("max_to_keep", *_COUNT)),
        ocm.EveryNStepsClosest: (("interval_steps", *_INTERVAL), ("max_to_keep", *_COUNT)),
        ocm.LatestDuration: (("duration", _is_duration, "a timedelta"),),
    }
