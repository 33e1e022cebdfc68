"""Options of plain Orbax's manager, their effect on the two tiers, and the rejected ones."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.config.policies import PreservationPolicy, SavePolicy
from emergency_ckpt.config.settings import default_local_dir
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.orbax.options import (
    CheckpointManagerOptions as BothTiers,
)
from emergency_ckpt.orbax.options import (
    LocalCheckpointOptions,
    PersistentCheckpointOptions,
    ShouldSaveFunction,
)

_MOST_STEPS_BETWEEN = 10

_WITHOUT_EFFECT = (
    *("create", "cleanup_tmp_directories", "single_host_load_and_broadcast"),
    *("enable_background_delete", "num_deletion_threads", "file_options", "atomicity_options"),
    *("save_root_metadata", "temporary_path_class", "prevent_write_metrics"),
    *("enable_should_save_is_saving_in_progress_check", "lightweight_initialize"),
)
_REFUSED = {
    "step_prefix": "steps are named by their plain number; those with a prefix are found",
    "step_format_fixed_length": "steps are named by their plain number; padded ones are found",
    "step_name_format": "steps are named by their plain number",
    "todelete_subdir": "old steps are removed, not moved",
    "todelete_full_path": "old steps are removed, not moved",
    "enable_per_process_directory_creation": "steps are written by one slice or by all",
}


@dataclasses.dataclass
class CheckpointManagerOptions(ocp.CheckpointManagerOptions):
    """Orbax's options, followed by those of the RAM tier, which all have defaults.

    Attributes:
      local: save schedule and retention of the local tier; None: a save every 10 steps, or every
        ``save_interval_steps`` if that is less, and the newest step is kept.
      local_directory: on this host's ramdisk; None: the environment's ECKPT_LOCAL_DIR, else
        ``/dev/shm/eckpt``. It is created if it does not exist.
      settings: further settings of ``emergency_ckpt.config.Config``, by name, which have
        precedence. ``mesh`` and ``replica_axis`` define the slices; without them they are the
        positions on the first axis of the state's mesh along which no leaf is split.
    """

    local: LocalCheckpointOptions | None = None
    local_directory: str | os.PathLike[str] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def local_directory_of(options: ocp.CheckpointManagerOptions) -> str:
    """Return the RAM tier's directory of this process."""
    given = getattr(options, "local_directory", None)
    return os.fspath(given or default_local_dir(os.environ))


def both_tiers(options: ocp.CheckpointManagerOptions) -> BothTiers:
    """Return the equivalent options for both tiers. A warning names the options without effect.

    Raises:
      ValueError: an option that would change the written format, and is not supported.
      ConfigError: no options of Orbax's.
    """
    _check(options)
    read_only = options.read_only
    off = {"save_every": 0, "save_on_preemption": False} if read_only else {}
    local = getattr(options, "local", None) or LocalCheckpointOptions(
        save_interval_steps=min(options.save_interval_steps or 1, _MOST_STEPS_BETWEEN),
        read_only=read_only,
    )
    return BothTiers(
        local=dataclasses.replace(local, with_one_slice=True),
        persistent=PersistentCheckpointOptions(
            save_decision_policy=_save_policy(options),
            preservation_policy=_preservation_policy(options),
        ),
        enable_async_checkpointing=options.enable_async_checkpointing,
        async_options=options.async_options,
        best_fn=options.best_fn,
        best_mode=cast("Any", options.best_mode),
        settings={"replica_axis": None, **off, **getattr(options, "settings", {})},
    )


def without_saves(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """Return Orbax's options for a manager that saves and removes no step."""
    names = [each.name for each in dataclasses.fields(ocp.CheckpointManagerOptions) if each.init]
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    none = ("should_save_fn", "preservation_policy", "max_to_keep", "keep_time_interval")
    given |= dict.fromkeys((*none, "keep_period"))
    given |= {"save_decision_policy": _Never(), "cleanup_tmp_directories": False}
    given["lightweight_initialize"] = True
    return ocp.CheckpointManagerOptions(**given)


class _Never:
    """A save decision policy."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        del step, previous_steps, context
        return False


def _check(options: ocp.CheckpointManagerOptions) -> None:
    plain = ocp.CheckpointManagerOptions()
    if not isinstance(options, ocp.CheckpointManagerOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
        problem = f"options must be CheckpointManagerOptions, not {options!r}"
        raise ConfigError([problem], target="CheckpointManager")
    for name, reason in _REFUSED.items():
        if getattr(options, name, None) not in (None, getattr(plain, name, None)):
            raise ValueError(f"{name} is not supported: {reason}")
    processes: Any = options.multiprocessing_options
    if processes.primary_host not in (None, 0) or processes.active_processes is not None:
        raise ValueError("multiprocessing_options: all processes save, and process 0 leads")
    ignored = [
        name
        for name in _WITHOUT_EFFECT
        if getattr(options, name, None) != getattr(plain, name, None) and not options.read_only
    ]
    if ignored:
        logging.warning("options without effect: %s", ", ".join(ignored))


def _save_policy(options: ocp.CheckpointManagerOptions) -> SavePolicy:
    """Return the save policy that Orbax makes of its options."""
    if options.save_decision_policy is not None:
        return cast("SavePolicy", options.save_decision_policy)
    policies: list[Any] = [ocm.PreemptionCheckpointingPolicy()]
    if options.should_save_fn is not None:
        policies.append(ShouldSaveFunction(options.should_save_fn))
    else:
        policies += [
            ocm.FixedIntervalPolicy(options.save_interval_steps),
            ocm.SpecificStepsPolicy(options.save_on_steps or ()),
            ocm.InitialSavePolicy(),
        ]
    return cast("SavePolicy", ocm.AnySavePolicy(policies))


def _preservation_policy(options: ocp.CheckpointManagerOptions) -> PreservationPolicy | None:
    """Return the preservation policy that Orbax makes of its options; None keeps all."""
    if options.preservation_policy is not None or options.max_to_keep is None:
        return cast("PreservationPolicy | None", options.preservation_policy)
    count = max(1, options.max_to_keep)
    policies: list[Any] = []
    if options.keep_period is not None:
        policies.append(ocm.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(ocm.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        policies.append(ocm.LatestN(count))
    else:
        policies.append(
            ocm.BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=count,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    return cast("PreservationPolicy", ocm.AnyPreservationPolicy(policies))
