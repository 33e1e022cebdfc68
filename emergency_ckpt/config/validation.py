"""What is wrong with the settings, all of it at once, in words for the user."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import jax
from etils import epath

from emergency_ckpt.background import LOWEST_PRIORITY
from emergency_ckpt.config.policy_checks import (
    is_whole,
    preservation_policy_problems,
    save_policy_problems,
)
from emergency_ckpt.core.address import split_holder
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, NAME_PATTERN
from emergency_ckpt.core.placement.policies import AllButPrimary, Striped
from emergency_ckpt.core.placement.writers import PersistentWriters
from emergency_ckpt.core.restore.majority import OnDivergence
from emergency_ckpt.core.save.snapshot_plan import snapshot_problems
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.run_secret import own_secret
from emergency_ckpt.types import Security

if TYPE_CHECKING:
    from emergency_ckpt.config.settings import Config

_LONGEST_TIMEOUT_S = 1e7
_MOST_LOCAL_STEPS = 64
_LONGEST_PATH_CHARS = 4096  # PATH_MAX of Linux
_LONGEST_CHARS = {"bind_host": 253}  # RFC 1035
_MOST_THREADS = 256  # of one native call

_UNSTORABLE = re.compile(r"[\\*?\[]|(?<=/)gs:(?=/)")
"""TensorStore takes a backslash for a slash. Orbax looks for what it has written by a pattern that
contains the whole path, and takes ``gs:`` in the middle of one for the start of a URL."""


def config_problems(config: Config) -> list[str]:
    """A line for each setting that will not do; none when the config is fine."""
    problems = _text_problems(config)
    if problems:
        # What follows takes them for texts.
        stand_ins = {name: "unset" if name == "run_id" else "/unset" for name, _ in problems}
        config = dataclasses.replace(config, **stand_ins)
    return [problem for _, problem in problems] + _value_problems(config)


def _text_problems(config: Config) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    for name in ("dir", "local_dir", "run_id", "bind_host", "secret_file", "orbax_item"):
        value = getattr(config, name)
        if value is None and name != "local_dir":
            continue
        if not isinstance(value, str):
            problems.append((name, f"{name} must be a text, not {value!r}"))
        elif not value and name in ("bind_host", "secret_file", "orbax_item"):
            problems.append((name, f"{name} is empty"))
        elif name == "orbax_item" and ("/" in value or value.startswith(".")):
            problems.append((name, f"orbax_item {value!r} is not the name of an item"))
        elif not value.isprintable():
            problems.append((name, f"{name} {value!r} has characters that no name has"))
        elif len(value) > (longest := _LONGEST_CHARS.get(name, _LONGEST_PATH_CHARS)):
            problems.append((name, f"{name} {value[:20]!r}... is longer than {longest} characters"))
    return problems


def _dir_problems(directory: str) -> list[str]:
    if not directory:
        return ["dir is empty"]
    wrong = _UNSTORABLE.search(f"{directory}/")
    if wrong is not None:
        return [f"dir {directory!r}: Orbax cannot store arrays below a name with {wrong.group()!r}"]
    if "://" not in directory:
        absolute = Path(directory).is_absolute()
        return [] if absolute else [f"dir {directory!r} is not an absolute path"]
    try:
        epath.Path(directory)
    except (KeyError, ValueError) as error:
        return [f"dir {directory!r} cannot be reached by etils.epath: {error}"]
    rest = directory.partition("://")[2]
    if "#" in rest or {".", ".."} & set(rest.split("/")):
        return [f"dir {directory!r}: Orbax would store arrays elsewhere (a '#', '.' or '..')"]
    return []


def _nested_problems(directory: str, local_dir: str) -> list[str]:
    """Neither tier may lie inside the other: what removes the one would take the other along."""
    if "://" in directory or not local_dir:
        return []
    # Not by realpath: it would wait for a file server that is down.
    stored, local = Path(os.path.abspath(directory)), Path(os.path.abspath(local_dir))
    if stored.is_relative_to(local):
        return [f"dir {directory!r} lies inside local_dir {local_dir!r}: it would be lost with RAM"]
    if local.is_relative_to(stored):
        return [f"local_dir {local_dir!r} lies inside dir {directory!r}: set one beside it"]
    return []


def _callable_problems(config: Config) -> list[str]:
    return [
        f"{name} must be a function, not {value!r}"
        for name in ("on_event", "host_state_remap")
        if (value := getattr(config, name)) is not None and not callable(value)
    ]


def _holder_problems(config: Config) -> list[str]:
    holders: Any = config.extra_holders
    if not isinstance(holders, tuple | list):
        return [f"extra_holders must be a tuple of addresses, not {holders!r}"]
    return [
        f"extra_holders: {holder!r} is no address such as '10.0.0.7:7411'"
        for holder in cast("Sequence[object]", holders)
        if not _is_address(holder)
    ]


def _is_address(holder: object) -> bool:
    if not isinstance(holder, str):
        return False
    host, _, port = split_holder(holder)[1].rpartition(":")
    return (
        bool(host)
        and "@" not in host
        and port.isascii()
        and port.isdigit()
        and 0 < int(port[:6]) < 65536
    )


def _choice_problems(config: Config) -> list[str]:
    problems: list[str] = []
    if config.dir is None and config.require_storage is True:
        problems.append("require_storage is set, but dir is not")
    if config.require_secret is True:
        problems += _secret_problems(config)
    if config.persistent_writers not in get_args(PersistentWriters):
        problems.append(
            f"persistent_writers must be 'primary' or 'striped', not {config.persistent_writers!r}"
        )
    if config.on_divergence not in get_args(OnDivergence):
        problems.append(f"on_divergence must be 'warn' or 'stop', not {config.on_divergence!r}")
    if config.transfer_security not in get_args(Security):
        problems.append(
            f"transfer_security must be 'mac', 'aead' or 'crc', not {config.transfer_security!r}"
        )
    placement: Any = config.placement
    if not isinstance(placement, AllButPrimary | Striped):
        problems.append(
            f"placement must be 'all_but_primary' or 'striped(<copies>)', not {placement!r}"
        )
    return problems


def _secret_problems(config: Config) -> list[str]:
    try:
        found = own_secret(config.secret_file, os.environ)
    except ConfigError as error:
        return list(error.problems)
    if found is not None:
        return []
    return ["require_secret is set, but neither secret_file nor ECKPT_SECRET gives a secret"]


def _value_problems(config: Config) -> list[str]:
    problems: list[str] = []
    if not config.local_dir:
        problems.append("local_dir is not set (a directory on a tmpfs, e.g. /dev/shm/eckpt)")
    elif not Path(config.local_dir).is_absolute():
        problems.append(f"local_dir {config.local_dir!r} is not an absolute path")
    if config.dir is None and config.run_id is None:
        problems.append("neither dir nor run_id is set: nothing names the run")
    if config.dir is not None:
        problems += _dir_problems(config.dir) or _nested_problems(config.dir, config.local_dir)
    if config.run_id is not None and not NAME_PATTERN.fullmatch(config.run_id):
        problems.append(f"run_id {config.run_id!r} may only have letters, digits, '.', '_' and '-'")
    if config.dir is None and config.save_every_n_steps not in (0, 1000):
        problems.append("save_every_n_steps is set, but dir is not")
    problems += _not_below(config, 0, ("local_save_every_n_steps", "save_every_n_steps"))
    problems += _not_below(config, 1, ("host_state_limit_bytes", "copy_batch_bytes"))
    problems += _not_below(config, 1, ("storage_buffer_bytes", "local_keep_last_n"))
    problems += _not_below(config, 1, ("transfer_streams",))
    if _not_below(config, 0, ("save_niceness",)) or config.save_niceness > LOWEST_PRIORITY:
        problems.append(
            f"save_niceness must be a whole number from 0 to {LOWEST_PRIORITY},"
            f" not {config.save_niceness!r}"
        )
    problems += snapshot_problems(config.snapshots)
    limit: Any = getattr(config, "host_state_limit_bytes")  # noqa: B009 - of any type still
    if isinstance(limit, int) and limit > MAX_HOST_STATE_BYTES:
        problems.append(
            f"host_state_limit_bytes must be at most {MAX_HOST_STATE_BYTES}, not {limit}:"
            " peers take no larger host state"
        )
    optional = {"keep_last_n": 1, "keep_every_n_steps": 1, "copy_threads": 1}
    for name, least in {**optional, "host_state_buddies": 0}.items():
        if getattr(config, name) is not None:
            problems += _not_below(config, least, (name,))
    threads: Any = config.copy_threads
    if isinstance(threads, int) and threads > _MOST_THREADS:
        problems.append(f"copy_threads must be at most {_MOST_THREADS}, not {threads}")
    problems += _policy_problems(config)
    problems += _choice_problems(config)
    problems += _timeout_problems(config)
    if _not_below(config, 0, ("bind_port",)) or config.bind_port > 65535:
        problems.append(f"bind_port {config.bind_port!r} is no port")
    problems += _mesh_problems(config) + _callable_problems(config) + _holder_problems(config)
    return problems


def _not_below(config: Config, least: int, names: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for name in names:
        value = getattr(config, name)
        if not is_whole(value, least):
            problems.append(f"{name} must be a whole number of at least {least}, not {value!r}")
    return problems


def _policy_problems(config: Config) -> list[str]:
    problems: list[str] = []
    for name in ("local_save_policy", "save_policy"):
        problems += save_policy_problems(name, getattr(config, name))
    for name in ("local_preservation_policy", "preservation_policy"):
        problems += preservation_policy_problems(name, getattr(config, name))
    for name in ("save_every_n_seconds", "save_policy"):
        if config.dir is None and getattr(config, name) is not None:
            problems.append(f"{name} is set, but dir is not")
    if config.keep_every_n_steps is not None and config.keep_last_n is None:
        problems.append("keep_every_n_steps is set, but keep_last_n is not: all steps are kept")
    kept: Any = config.local_keep_last_n
    if isinstance(kept, int) and kept > _MOST_LOCAL_STEPS:
        problems.append(f"local_keep_last_n must be at most {_MOST_LOCAL_STEPS}, not {kept}")
    if config.preservation_policy is not None and config.keep_last_n is not None:
        problems.append("preservation_policy and keep_last_n are both set")
    flags = (
        "async_save",
        "save_on_preemption",
        "exit_on_preemption",
        "allow_missing_host_state",
        "take_over_dir",
        "require_storage",
        "require_signed",
        "save_on_stop",
    )
    for name in flags:
        if not isinstance(getattr(config, name), bool):
            problems.append(f"{name} must be True or False, not {getattr(config, name)!r}")
    return problems


def _timeout_problems(config: Config) -> list[str]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    optional = ("local_save_every_n_seconds", "save_every_n_seconds", "ramdisk_wait_s")
    if values["ramdisk_wait_s"] == 0:
        del values["ramdisk_wait_s"]  # no waiting
    return [
        f"{name} must be a positive number of seconds, not {value!r}"
        for name, value in values.items()
        if (name.endswith(("_timeout_s", "_grace_s")) or (name in optional and value is not None))
        and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _LONGEST_TIMEOUT_S
        )
    ]


def _mesh_problems(config: Config) -> list[str]:
    mesh: Any = config.mesh
    axis: Any = config.replica_axis
    if isinstance(axis, bool) or not isinstance(axis, str | int | None):
        return [f"replica_axis must be the name or the number of an axis, not {axis!r}"]
    if mesh is None:
        return []
    if not isinstance(mesh, jax.sharding.Mesh):
        return [f"mesh must be a jax.sharding.Mesh, not {mesh!r}"]
    axes = mesh.axis_names
    if isinstance(axis, str) and axis not in axes:
        return [f"replica_axis {axis!r} is not one of the mesh's axes {axes}"]
    if isinstance(axis, int) and not 0 <= axis < len(axes):
        return [f"replica_axis {axis} is out of range for the mesh's axes {axes}"]
    return []
