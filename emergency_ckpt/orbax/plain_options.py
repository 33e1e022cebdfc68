"""Options of plain Orbax's manager, their effect on the two tiers, and the rejected ones."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.config.policies import PreservationPolicy, SavePolicy, parts_of
from emergency_ckpt.config.settings import default_local_dir
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.orbax.options import (
    CheckpointManagerOptions as BothTiers,
)
from emergency_ckpt.orbax.options import (
    LocalCheckpointOptions,
    PersistentCheckpointOptions,
    ShouldSaveFunction,
    StepNames,
    step_name_of,
)

_MOST_STEPS_BETWEEN = 10
_BY_STEP_ALONE = (ocm.FixedIntervalPolicy, ocm.SpecificStepsPolicy, ocm.InitialSavePolicy)
"""Policies that may be asked for each tier: their answer changes nothing."""

_WITHOUT_EFFECT = (
    *("create", "cleanup_tmp_directories", "single_host_load_and_broadcast"),
    *("enable_background_delete", "num_deletion_threads", "lightweight_initialize"),
    "enable_should_save_is_saving_in_progress_check",
)
"""Options of how the work is done, which change no step."""
_REFUSED = {
    "todelete_full_path": "in a bucket old steps are deleted: set the bucket's soft delete, or copy"
    " with `eckpt export` what is to be kept",
    "file_options": "set the process's umask for the permissions of new files",
    "atomicity_options": "a step appears by a rename, in a bucket by its commit_success.txt",
    "temporary_path_class": "give CommitFileTemporaryPath or AtomicRenameTemporaryPath: steps are"
    " renamed into place, and have a commit_success.txt",
    "enable_per_process_directory_creation": "use settings={'persistent_writers': 'striped'}, by"
    " which all slices write",
}


@dataclasses.dataclass
class CheckpointManagerOptions(ocp.CheckpointManagerOptions):
    """Orbax's options, followed by those of the RAM tier, which all have defaults.

    Attributes:
      local: save schedule and retention of the local tier; None: a save every 10 steps, or every
        ``save_interval_steps`` if that is less, and at the steps that storage is given by number;
        the newest step is kept.
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


def both_tiers(options: ocp.CheckpointManagerOptions, is_saving: Callable[[], bool]) -> BothTiers:
    """Return the equivalent options for both tiers. A warning names the options without effect.

    ``is_saving``: whether this process has a save in progress.

    Raises:
      ValueError: an option that would change the written format, and is not supported.
      ConfigError: no options of Orbax's.
    """
    _check(options)
    read_only = options.read_only
    off = {"save_every": 0, "save_on_preemption": False} if read_only else {}
    policies = _save_policies(options, is_saving)
    local = getattr(options, "local", None) or LocalCheckpointOptions(
        save_decision_policy=_local_policy(options, policies), read_only=read_only
    )
    return BothTiers(
        local=dataclasses.replace(local, with_one_slice=True),
        persistent=PersistentCheckpointOptions(
            save_decision_policy=_any_of(policies),
            preservation_policy=_preservation_policy(options),
        ),
        enable_async_checkpointing=options.enable_async_checkpointing,
        step_name_format=step_names_of(options),
        async_options=options.async_options,
        best_fn=options.best_fn,
        best_mode=cast("Any", options.best_mode),
        settings={
            "replica_axis": None,
            "todelete_subdir": options.todelete_subdir,
            **off,
            **getattr(options, "settings", {}),
        },
    )


def step_names_of(options: ocp.CheckpointManagerOptions) -> StepNames:
    """Return the names of steps that the options ask for, as Orbax's manager takes them."""
    standard = ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
        single_host_load_and_broadcast=options.single_host_load_and_broadcast,
    )
    return StepNames(options.step_name_format or standard)


def without_saves(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """Return Orbax's options for a manager that saves and removes no step."""
    names = [each.name for each in dataclasses.fields(ocp.CheckpointManagerOptions) if each.init]
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    none = ("should_save_fn", "preservation_policy", "max_to_keep", "keep_time_interval")
    given |= dict.fromkeys((*none, "keep_period"))
    given |= {"save_decision_policy": _Never(), "cleanup_tmp_directories": False}
    given |= {"lightweight_initialize": True, "step_name_format": step_names_of(options)}
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
        given = getattr(options, name)
        if given not in (None, getattr(plain, name)) and not _is_followed(name, given):
            raise ValueError(f"{name} is not supported: {reason}")
    step_name_of(step_names_of(options))
    processes: Any = options.multiprocessing_options
    leader = processes.primary_host
    is_alone = ocp.multihost.process_count() == 1
    if leader not in ((None, 0) if is_alone else (0,)) or processes.active_processes is not None:
        raise ValueError(
            "multiprocessing_options: all processes save, and process 0 leads: leave primary_host"
            " and active_processes out"
        )
    ignored = [
        name
        for name in _WITHOUT_EFFECT
        if getattr(options, name, None) != getattr(plain, name, None) and not options.read_only
    ]
    if ignored:
        logging.warning("options without effect: %s", ", ".join(ignored))


class _Continuous:
    """Orbax's continuous policy in a job of one process, which has nobody to agree with."""

    def __init__(self, minimum_s: float, is_saving: Callable[[], bool]) -> None:
        self._minimum = datetime.timedelta(seconds=minimum_s)
        self._is_saving = is_saving

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        del context
        if self._is_saving():
            return False
        return not previous_steps or step.time - previous_steps[-1].time >= self._minimum


def _is_followed(name: str, given: Any) -> bool:
    """Return whether a value of an option that is refused otherwise is followed anyway."""
    atomic = ocp.path.atomicity
    kinds = (atomic.CommitFileTemporaryPath, atomic.AtomicRenameTemporaryPath)
    return name == "temporary_path_class" and given in kinds


def _save_policies(
    options: ocp.CheckpointManagerOptions, is_saving: Callable[[], bool]
) -> list[Any]:
    """Return the save policies that Orbax makes of its options; each may ask for a save."""
    if options.save_decision_policy is not None:
        return [_here(part, is_saving) for part in parts_of(options.save_decision_policy)]
    policies: list[Any] = [ocm.PreemptionCheckpointingPolicy()]
    if options.should_save_fn is not None:
        return [*policies, ShouldSaveFunction(options.should_save_fn)]
    policies += [
        ocm.FixedIntervalPolicy(options.save_interval_steps),
        ocm.SpecificStepsPolicy(options.save_on_steps or ()),
        ocm.InitialSavePolicy(),
    ]
    return policies


def _here(policy: Any, is_saving: Callable[[], bool]) -> Any:
    if type(policy) is not ocm.ContinuousCheckpointingPolicy or ocp.multihost.process_count() > 1:
        return policy
    return _Continuous(policy.minimum_interval_secs or 0, is_saving)


def _local_policy(options: ocp.CheckpointManagerOptions, storage: Sequence[Any]) -> SavePolicy:
    """Return RAM's policy: of storage's what can be asked twice, and an interval."""
    has_own_policy = options.save_decision_policy is not None or options.should_save_fn is not None
    interval = 0 if has_own_policy else options.save_interval_steps
    policies = [each for each in storage if isinstance(each, (*_BY_STEP_ALONE, _Continuous))]
    policies += [ocm.PreemptionCheckpointingPolicy()]
    policies += [ocm.FixedIntervalPolicy(min(interval or _MOST_STEPS_BETWEEN, _MOST_STEPS_BETWEEN))]
    return _any_of(policies)


def _any_of(policies: Sequence[Any]) -> SavePolicy:
    return cast("SavePolicy", ocm.AnySavePolicy(list(policies)))


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
