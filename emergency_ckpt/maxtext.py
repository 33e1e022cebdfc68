"""MaxText's checkpointing flags, with their names and meaning, as settings or as a manager.

``with_data`` adds the data iterator to MaxText's emergency mode.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.checkpointer import CheckpointerConfig
from emergency_ckpt.config import OrbaxFace
from emergency_ckpt.config.table import Setting
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.orbax import (
    CheckpointManager,
    CheckpointManagerOptions,
    LocalCheckpointOptions,
    PersistentCheckpointOptions,
)
from emergency_ckpt.orbax.options import merged_with
from emergency_ckpt.state.host_state_codec import Stateful, as_stateful

if TYPE_CHECKING:
    from emergency_ckpt.config.policies import SavePolicy

DEFAULTS: Mapping[str, Any] = {
    "enable_checkpointing": True,
    "async_checkpointing": True,
    "enable_continuous_checkpointing": False,
    "max_num_checkpoints_to_keep": None,
    "checkpoint_period": 10_000,
    "local_checkpoint_period": 0,
    "enable_multi_tier_checkpointing": False,
    "multi_tier_checkpointing_backup_interval_minutes": None,
    "multi_tier_checkpointing_backup_interval_steps": None,
}
"""The supported flags, and MaxText's defaults for them."""

_BACKUP_INTERVALS = (
    "multi_tier_checkpointing_backup_interval_minutes",
    "multi_tier_checkpointing_backup_interval_steps",
)
_PUT_AWAY = ("checkpoint_todelete_subdir", "checkpoint_todelete_full_path")
"""Flags that say where removed steps go."""


def from_maxtext(flags: object, **settings: Any) -> CheckpointerConfig:
    """Return a config from MaxText's flags and further ``settings``, which have precedence.

    Args:
      flags: MaxText's config object, or a mapping; other flags are ignored.

    Flags:
      enable_checkpointing: False: no tier saves; ``restore`` still works.
      async_checkpointing: False: ``save`` returns when the step is complete.
      enable_continuous_checkpointing: the persistent tier saves as soon as the previous save is
        complete, instead of every ``checkpoint_period`` steps, and so does the local tier if
        ``local_checkpoint_period`` is above 0.
      max_num_checkpoints_to_keep: number of newest steps kept in the persistent tier; None, or
        the text "None" of MaxText's base.yml, keeps all. A ``preservation_policy`` among the
        ``settings`` replaces the number.
      checkpoint_period, local_checkpoint_period: steps between saves to the persistent and to the
        local tier; 0 for none.
      enable_multi_tier_checkpointing: the persistent tier saves every
        ``multi_tier_checkpointing_backup_interval_minutes`` or ``..._steps``, of which one must be
        set, and not every ``checkpoint_period`` steps. The trainer's processes do it; there is no
        replicator.

    ``enable_single_replica_ckpt_restoring`` has no effect: a restore reads each byte once over the
    whole job in any case. Steps are stored as MaxText does, with the state as the item ``items``.

    Raises:
      ConfigError: a flag of the wrong type, or one that says where removed steps go.
    """
    values = _values(flags)
    of_flags: dict[str, Any] = {
        "async_save": values["async_checkpointing"],
        "save_every": _backup_interval(values) or values["checkpoint_period"],
        "local_save_every": values["local_checkpoint_period"],
        "keep_last_n": values["max_num_checkpoints_to_keep"],
    }
    if values["enable_continuous_checkpointing"]:
        of_flags["save_every"] = policy = ocm.ContinuousCheckpointingPolicy()
        if values["local_checkpoint_period"] > 0:
            of_flags["local_save_every"] = policy
    if not values["enable_checkpointing"]:
        of_flags |= {"save_every": 0, "local_save_every": 0, "on_preemption": "ignore"}
    config = CheckpointerConfig(orbax=OrbaxFace(item="items"))
    return config.set(**merged_with(of_flags, settings))


def create_checkpoint_manager(
    flags: object,
    global_mesh: jax.sharding.Mesh,
    abstract_state: Any,
    logger: Any = None,
    **settings: Any,
) -> CheckpointManager | None:
    """Return the manager of MaxText's emergency mode; None without ``enable_checkpointing``.

    Collective. Replaces ``create_orbax_emergency_checkpoint_manager``, with the same config.

    Args:
      flags: MaxText's config object, or a mapping. In addition to the flags of ``from_maxtext``:
        ``checkpoint_dir``, and ``local_checkpoint_directory``, which is created if its parent
        exists.
      settings: further settings of ``emergency_ckpt.config.Config``, which have precedence.

    Raises:
      ConfigError: a flag of the wrong type, or no directory. Otherwise as ``CheckpointManager``.
    """
    values = _values(flags)
    if not values["enable_checkpointing"]:
        return None
    places = [_flag(flags, n, "") for n in ("local_checkpoint_directory", "checkpoint_dir")]
    if not all(places):
        problem = "local_checkpoint_directory and checkpoint_dir must both be set"
        raise ConfigError([problem], target="MaxText's flags")
    Path(places[0]).mkdir(mode=0o700, exist_ok=True)
    continuous = values["enable_continuous_checkpointing"]
    backup = _backup_interval(values)
    if backup is not None and not continuous:
        settings = {"save_every": backup, **settings}
    return CheckpointManager(
        places[0],
        places[1],
        global_mesh,
        abstract_state,
        options=CheckpointManagerOptions(
            local=LocalCheckpointOptions(
                read_only=not values["local_checkpoint_period"],
                save_decision_policy=_when(values["local_checkpoint_period"], continuous),
            ),
            persistent=PersistentCheckpointOptions(
                save_decision_policy=_when(values["checkpoint_period"], continuous),
                max_to_keep=values["max_num_checkpoints_to_keep"],
            ),
            enable_async_checkpointing=values["async_checkpointing"],
            settings=settings,
        ),
        logger=logger,
    )


def with_data(manager: Any, data_iterator: Any) -> Any:
    """Return ``manager`` with MaxText's data iterator as the item ``dataset`` of its steps.

    MaxText's emergency mode saves the state alone. ``save`` and ``restore`` of the returned object
    keep and reposition the iterator too.

    Args:
      data_iterator: MaxText's, or a list of these. If one has no ``get_state`` and ``set_state``,
        as only Grain's iterators have, or is a placeholder, ``manager`` itself is returned.
    """
    loaders: list[Any] = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    known = [as_stateful(getattr(loader, "local_iterator", None)) for loader in loaders]
    iterators = [iterator for iterator in known if iterator is not None]
    return _WithData(manager, iterators) if len(iterators) == len(loaders) else manager


class _WithData:
    """The two calls of MaxText's emergency mode, with the iterators of this process."""

    def __init__(self, manager: CheckpointManager, iterators: list[Stateful]) -> None:
        self._manager = manager
        self._iterators = iterators

    def save(self, step: int, args: Any, **further: Any) -> bool:
        return self._manager.save(step, self._with_dataset(args), **further)

    def restore(self, step: int | None, args: Any) -> Any:
        return self._manager.restore(step, self._with_dataset(args))

    def _with_dataset(self, args: Any) -> Any:
        return ocp.args.Composite(**dict(args.items()), dataset=self._iterators)


def _backup_interval(values: Mapping[str, Any]) -> datetime.timedelta | int | None:
    """Return the interval of multi-tier mode for the persistent tier; None in other modes."""
    if not values["enable_multi_tier_checkpointing"]:
        return None
    minutes, steps = (values[name] for name in _BACKUP_INTERVALS)
    return datetime.timedelta(minutes=minutes) if minutes else steps


def _when(period: int, continuous: bool) -> SavePolicy:
    """Return MaxText's policy: the interval, the first step, and the sync point of a preemption."""
    policies: list[Any] = [ocm.PreemptionCheckpointingPolicy()]
    if continuous:
        policies.append(ocm.ContinuousCheckpointingPolicy())
    elif period:
        policies += [ocm.FixedIntervalPolicy(period), ocm.InitialSavePolicy()]
    return cast("SavePolicy", ocm.AnySavePolicy(policies))


def _values(flags: object) -> dict[str, Any]:
    values = {name: _flag(flags, name, default) for name, default in DEFAULTS.items()}
    # base.yml has the text "None", since YAML has no None.
    values |= {n: None for n, value in values.items() if value == "None" and DEFAULTS[n] is None}
    problems: list[str] = []
    for name, default in DEFAULTS.items():
        kind = bool if isinstance(default, bool) else int
        row = Setting(name=name, kind=kind, is_optional=default is None, default=default)
        if problem := row.problem(values[name]):
            problems.append(problem)
    for name in _PUT_AWAY:
        # base.yml has an empty text, or the text "None".
        if _flag(flags, name, None) not in (None, "", "None"):
            problems.append(
                f"{name} is not supported: leave it unset, and set the bucket's soft delete, or"
                " copy the folder of a step that is to stay"
            )
    if values["enable_multi_tier_checkpointing"] is True:
        given = [name for name in _BACKUP_INTERVALS if values[name]]
        if len(given) != 1:
            problems.append(f"exactly one of {', '.join(_BACKUP_INTERVALS)} must be above 0")
    if problems:
        raise ConfigError(problems, target="MaxText's flags")
    return values


def _flag(flags: object, name: str, default: Any) -> Any:
    if isinstance(flags, Mapping):
        return cast("Mapping[str, Any]", flags).get(name, default)
    try:
        return getattr(flags, name, default)
    except ValueError:  # MaxText's own config raises this for unknown names
        return default
