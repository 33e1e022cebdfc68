"""Every fault of a config, all of them at once, in words for the user.

A value alone is judged by its row of the table, what rows cannot say by the rules here. A rule is
left out where a value that it looks at is at fault by its row.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
from etils import epath

from emergency_ckpt.config.policies import parts_of
from emergency_ckpt.config.table import LONGEST_TIME_S, is_complete, settings_table
from emergency_ckpt.core.limits import NAME_PATTERN
from emergency_ckpt.core.placement.placement_policies import PlacementPolicy
from emergency_ckpt.core.save.timing import TimingRule
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.events import Event
from emergency_ckpt.extensions import extension_of
from emergency_ckpt.observer import Observer, OnEvent
from emergency_ckpt.run_secret import own_secret

_UNSTORABLE = re.compile(r"[\\*?\[]|(?<=/)gs:(?=/)")
"""TensorStore takes a backslash for a slash. Orbax looks for what it has written by a pattern that
contains the whole path, and takes ``gs:`` in the middle of one for the start of a URL."""


def config_problems(given: Any) -> list[str]:
    """Return a line for each fault of ``given``: a ``Config`` whose values are of any type."""
    values = {row: getattr(given, row.name) for row in settings_table(type(given))}
    faults = {row.name: line for row, value in values.items() if (line := row.problem(value))}
    lines = list(faults.values())
    for row, value in values.items():
        if row.needs and getattr(given, row.needs) is None and value not in (row.default, None, 0):
            lines.append(f"{row.name} is set, but {row.needs} is not")
    for names, rule in _RULES:
        if not faults.keys() & set(names):
            lines += rule(*(getattr(given, name) for name in names))
    return lines


def _line(is_fault: bool, text: str) -> list[str]:
    return [text] if is_fault else []


def _local_dir_problems(local_dir: str) -> list[str]:
    if not local_dir:
        return ["local_dir is not set (a directory on a tmpfs, e.g. /dev/shm/eckpt)"]
    return _line(
        not Path(local_dir).is_absolute(), f"local_dir {local_dir!r} is not an absolute path"
    )


def _run_problems(directory: str | None, run_id: str | None) -> list[str]:
    return _line(
        directory is None and run_id is None, "neither dir nor run_id is set: nothing names the run"
    )


def _run_id_problems(run_id: str | None) -> list[str]:
    return _line(
        run_id is not None and not NAME_PATTERN.fullmatch(run_id),
        f"run_id {run_id!r} may only have letters, digits, '.', '_' and '-'",
    )


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


def _on_event_problems(on_event: object) -> list[str]:
    problems: list[str] = []
    for listener in listeners_of(on_event):
        if isinstance(listener, str):
            try:
                made_observer(listener)
            except ConfigError as error:
                problems += error.problems
        elif isinstance(listener, type) or not callable(listener):
            problems.append(f"on_event: {listener!r} is neither a function nor an observer")
    return problems


def _dir_problems(directory: str | None) -> list[str]:
    if directory is None:
        return []
    wrong = _UNSTORABLE.search(f"{directory}/")
    if wrong is not None:
        return [f"dir {directory!r}: Orbax cannot store arrays below a name with {wrong.group()!r}"]
    if "://" not in directory:
        absolute = Path(directory).is_absolute()
        return _line(not absolute, f"dir {directory!r} is not an absolute path")
    try:
        epath.Path(directory)
    except (KeyError, ValueError) as error:
        why = f"which knows no {error}" if isinstance(error, KeyError) else str(error)
        return [f"dir {directory!r} cannot be reached by etils.epath, {why}"]
    rest = directory.partition("://")[2]
    if not rest.partition("/")[0]:
        return [f"dir {directory!r} names no bucket"]
    return _line(
        "#" in rest or bool({".", ".."} & set(rest.split("/"))),
        f"dir {directory!r}: Orbax would store arrays elsewhere (a '#', '.' or '..')",
    )


def _nested_problems(directory: str | None, local_dir: str) -> list[str]:
    """Neither tier may lie inside the other: what removes the one would take the other along."""
    if directory is None or not local_dir or not Path(directory).is_absolute():
        return []
    # Not by realpath: it would wait for a file server that is down.
    stored, local = Path(os.path.abspath(directory)), Path(os.path.abspath(local_dir))
    if stored.is_relative_to(local):
        return [f"dir {directory!r} lies inside local_dir {local_dir!r}: it would be lost with RAM"]
    return _line(
        local.is_relative_to(stored),
        f"local_dir {local_dir!r} lies inside dir {directory!r}: set one beside it",
    )


def _one_preservation(policy: object, keep_last_n: int | None) -> list[str]:
    return _line(
        policy is not None and keep_last_n is not None,
        "preservation_policy and keep_last_n are both set",
    )


def _placement_problems(placement: object) -> list[str]:
    return _line(
        not isinstance(placement, PlacementPolicy) or isinstance(placement, type),
        f"placement must be 'all_but_primary', 'striped(<copies>)' or a policy, not {placement!r}",
    )


def _storage_problems(require: Collection[str], directory: str | None) -> list[str]:
    return _line(
        "storage" in require and directory is None, "require has 'storage', but dir is not set"
    )


def _secret_problems(require: Collection[str], secret_file: str | None) -> list[str]:
    if "secret" not in require:
        return []
    try:
        secret = own_secret(secret_file, os.environ)
    except ConfigError as error:
        return list(error.problems)
    return _line(
        secret is None,
        "require has 'secret', but neither secret_file nor ECKPT_SECRET gives a secret",
    )


def _mesh_problems(mesh: object, axis: object) -> list[str]:
    if isinstance(axis, bool) or not isinstance(axis, str | int | None):
        return [f"replica_axis must be the name or the number of an axis, not {axis!r}"]
    if mesh is None:
        return []
    if not isinstance(mesh, jax.sharding.Mesh):
        return [f"mesh must be a jax.sharding.Mesh, not {mesh!r}"]
    axes = mesh.axis_names
    if isinstance(axis, str) and axis not in axes:
        return [f"replica_axis {axis!r} is not one of the mesh's axes {axes}"]
    return _line(
        isinstance(axis, int) and not 0 <= axis < len(axes),
        f"replica_axis {axis} is out of range for the mesh's axes {axes}",
    )


_Rule = tuple[tuple[str, ...], Callable[..., list[str]]]

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
        elif isinstance(part, TimingRule) and not isinstance(part, type):
            continue
        else:
            problems += _object_problems(name, part, "should_save") or _field_problems(name, part)
    return problems


def preservation_policy_problems(policy: object | None) -> list[str]:
    """Return the faults of ``preservation_policy``; empty when it has none."""
    name = "preservation_policy"
    if policy is None:
        return []
    if problems := _object_problems(name, policy, "should_preserve"):
        return problems
    from orbax.checkpoint import checkpoint_managers as ocm  # noqa: PLC0415

    if type(policy) is ocm.AnyPreservationPolicy and _is_sequence(policy.policies):
        parts: Sequence[object] = policy.policies
        return [line for part in parts for line in preservation_policy_problems(part)]
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


_RULES: tuple[_Rule, ...] = (
    (("local_dir",), _local_dir_problems),
    (("dir", "run_id"), _run_problems),
    (("run_id",), _run_id_problems),
    (("dir",), _dir_problems),
    (("on_event",), _on_event_problems),
    (("dir", "local_dir"), _nested_problems),
    (("preservation_policy", "keep_last_n"), _one_preservation),
    *(((name,), partial(save_problems, name)) for name in ("local_save_every", "save_every")),
    (("preservation_policy",), preservation_policy_problems),
    (("placement",), _placement_problems),
    (("require", "dir"), _storage_problems),
    (("require", "secret_file"), _secret_problems),
    (("mesh", "replica_axis"), _mesh_problems),
)
