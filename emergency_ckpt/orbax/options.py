"""Options of the manager: Orbax's names, fields, defaults and meaning, and a few more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_origin

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt.config import Config, OrbaxFace
from emergency_ckpt.config.policies import (
    PerProcessPolicy,
    PreservationPolicy,
    SavePolicy,
    is_interval,
    parts_of,
)
from emergency_ckpt.config.table import settings_table
from emergency_ckpt.core.step_names import is_format, name_of
from emergency_ckpt.errors import ConfigError

ShouldSave = Callable[[int, int | None], bool]

_KEPT = ("keep_last_n", "preservation_policy")
"""Settings that select the steps to keep in storage, of which only one may be set."""


@dataclasses.dataclass
class LocalCheckpointOptions:
    """Save schedule and retention of the local tier.

    Attributes:
      save_interval_steps: steps between saves; the first step of a run is saved too.
      max_to_keep: number of newest complete steps kept, without the one being written; 1 unless a
        ``preservation_policy`` is set. RAM is reserved for one step more.
      read_only: the local tier saves nothing.
      should_save_fn: ``(step, newest saved step or None) -> bool``, instead of the interval.
      save_decision_policy: instead of both. As with Orbax, it and ``should_save_fn`` are called on
        every process and must return the same; decisions by the clock are agreed.
      preservation_policy: only ``LatestN`` with a number, which is ``max_to_keep`` in other words.
      debug_use_full_global_mesh: no effect.
      with_one_slice: save locally also in a job of one slice, unlike Orbax.
    """

    save_interval_steps: int = 10
    max_to_keep: int | None = None
    read_only: bool = False
    should_save_fn: ShouldSave | None = None
    save_decision_policy: SavePolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    debug_use_full_global_mesh: bool = False
    with_one_slice: bool = False

    def __post_init__(self) -> None:
        _check_one_rule(self)
        if self.preservation_policy is None and self.max_to_keep is None:
            self.max_to_keep = 1


@dataclasses.dataclass
class PersistentCheckpointOptions:
    """Save schedule and retention of the persistent tier.

    Attributes:
      read_only: the persistent tier saves nothing. With ``read_only`` of the local tier too the
        manager is an evaluator's: it claims nothing, and may run beside the job that saves.
      save_interval_steps, should_save_fn, save_decision_policy: as in the local tier.
      max_to_keep: number of newest steps kept; None keeps all. The last complete step always stays.
      keep_period: with ``max_to_keep``: steps that are multiples of it are kept too.
      preservation_policy: selects the steps to keep, instead of the previous two.
    """

    save_interval_steps: int = 1000
    max_to_keep: int | None = None
    keep_period: int | None = None
    should_save_fn: ShouldSave | None = None
    save_decision_policy: SavePolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        _check_one_rule(self)
        if self.preservation_policy is not None and self.keep_period is not None:
            raise ValueError("keep_period and preservation_policy are both set: use one")


@dataclasses.dataclass
class MultiprocessingOptions:
    """``coordination_timeout_secs``: maximum wait for other processes, in seconds."""

    coordination_timeout_secs: int = 120


@dataclasses.dataclass
class CheckpointManagerOptions:
    """Options of ``CheckpointManager``.

    Attributes:
      replica_axis_index: axis of the mesh along which slices are replicas.
      step_name_format: of new steps: with a prefix and padding or without, as of
        ``ocp.path.step.standard_name_format``. Steps under other such names are found too.
      cleanup_tmp_directories: no effect: leftovers of unfinished saves are removed at the first
        save.
      enable_async_checkpointing: False: ``save`` returns when the step is complete, and raises
        when it failed.
      async_options: its ``timeout_secs`` is the longest time of a save to storage and of a restore,
        where it is longer than the default of ``total_timeout_s``. On each process a background
        thread calls its ``post_finalization_callback`` when a step is known to be whole in storage,
        and logs an error of the callback. Its other fields have no effect.
      multiprocessing_options: its ``coordination_timeout_secs`` is twice ``stall_timeout_s``.
      single_host_load_and_broadcast: no effect: each byte is read from storage once anyway.
      best_fn, best_mode: criterion of ``best_step``: ``best_fn(metrics)`` returns a number, of
        which the largest (``"max"``) or the smallest (``"min"``) is best.
      settings: further settings of ``emergency_ckpt.config.Config``, by name, which have
        precedence. An interval among them replaces the save schedule of that tier's options, and
        ``keep_last_n`` or ``preservation_policy`` the rule by which storage keeps steps.
    """

    local: LocalCheckpointOptions = dataclasses.field(default_factory=LocalCheckpointOptions)
    persistent: PersistentCheckpointOptions = dataclasses.field(
        default_factory=PersistentCheckpointOptions
    )
    replica_axis_index: int = 0
    step_name_format: Any = dataclasses.field(default_factory=ocp.path.step.standard_name_format)
    cleanup_tmp_directories: bool = False
    enable_async_checkpointing: bool = True
    async_options: ocp.AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions | None = None
    single_host_load_and_broadcast: bool = True
    best_fn: Callable[[Any], float] | None = None
    best_mode: Literal["max", "min"] = "max"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def check_kinds(options: object, global_mesh: object) -> None:
    """Raise ConfigError, with every fault, where an option or the mesh is of a wrong kind.

    Orbax's own options are taken too, and what they lack has its default.
    """
    problems = _kind_problems("options", options, CheckpointManagerOptions)
    if not isinstance(global_mesh, jax.sharding.Mesh | None):
        problems.append(f"global_mesh must be a jax.sharding.Mesh, not {global_mesh!r}")
    if problems:
        raise ConfigError(problems, target="CheckpointManager")


def _kind_problems(name: str, given: object, kind: type) -> list[str]:
    if not isinstance(given, kind) and type(given).__name__ != kind.__name__:
        return [f"{name} must be {kind.__name__}, not {given!r}"]
    below = "" if kind is CheckpointManagerOptions else f"{name}."
    problems: list[str] = []
    for row in settings_table(kind):
        value: Any = getattr(given, row.name, row.default)
        if value is dataclasses.MISSING or (value is None and row.is_optional):
            continue
        label = f"{below}{row.name}"
        if row.name == "step_name_format":
            if not hasattr(value, "build_name"):
                problems.append(f"{label} must be a format of step names, not {value!r}")
        elif dataclasses.is_dataclass(row.kind):
            problems += _kind_problems(label, value, cast("type", row.kind))
        elif get_origin(row.kind) is Mapping:
            if not isinstance(value, Mapping):
                problems.append(f"{label} must be a mapping, not {value!r}")
        elif line := row.problem(value):
            problems.append(f"{below}{line}")
    return problems


@dataclasses.dataclass(frozen=True)
class ShouldSaveFunction:
    """``should_save_fn`` as a policy, for a list of policies."""

    function: ShouldSave

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Return the function's answer for the step and the newest saved step."""
        del context
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


def step_name_of(step_name_format: Any) -> str:
    """Return the name of step 0 in Orbax's format: ``OrbaxFace.step_name``.

    ValueError when the format has other names than a prefix, an underscore and padding make.
    """
    of_zero = step_name_format.build_name(0)
    probes = (7, 123456)
    if not is_format(of_zero) or any(
        step_name_format.build_name(step) != name_of(step, of_zero) for step in probes
    ):
        raise ValueError(
            f"step_name_format or step_prefix with names such as {of_zero!r} is not supported: a"
            " name is a number, which may have a prefix and padding: give standard_name_format(...)"
            " of ocp.path.step, in a composite_name_format too"
        )
    return of_zero


def settings_of(options: CheckpointManagerOptions, *, one_slice: bool) -> dict[str, Any]:
    """Return the equivalent settings of an ``EmergencyCheckpointer``. Accepts Orbax's options too.

    Raises:
      ValueError: a custom step name format, or a policy by which RAM keeps others than the newest.
    """
    local, persistent = options.local, options.persistent
    is_read = getattr(persistent, "read_only", False)
    waiting = options.multiprocessing_options or MultiprocessingOptions()
    settings: dict[str, Any] = {
        "save_every": 0 if is_read else save_policy_of(persistent),
        "preservation_policy": persistent.preservation_policy,
        "async_save": options.enable_async_checkpointing,
        "on_preemption": "ignore",  # the policies decide it
        "stall_timeout_s": waiting.coordination_timeout_secs / 2,
        # Orbax waits for the previous save, skips none, and keeps no step beyond those asked for.
        "orbax": OrbaxFace(
            step_name=step_name_of(options.step_name_format),
            waits_for_storage=True,
            drops_older_steps=True,
        ),
    }
    if options.async_options is not None:
        # A shorter limit would also end restores, which have none in Orbax.
        longest_s = float(options.async_options.timeout_secs)
        settings["total_timeout_s"] = max(longest_s, Config().total_timeout_s)
    if persistent.preservation_policy is None and persistent.max_to_keep is not None:
        settings["keep_last_n"] = max(1, persistent.max_to_keep)
        settings["keep_every_n_steps"] = persistent.keep_period
    if local.read_only or (one_slice and not getattr(local, "with_one_slice", False)):
        settings["local_save_every"] = 0
        return settings
    settings["local_save_every"] = save_policy_of(local)
    settings["local_keep_last_n"] = _steps_in_ram(local)
    return settings


def _steps_in_ram(local: LocalCheckpointOptions) -> int:
    """Return the number of newest steps that RAM keeps. ValueError: a policy keeps other steps."""
    policy = local.preservation_policy
    if policy is None:
        return max(1, local.max_to_keep or 1)
    if type(policy) is not ocm.LatestN or not policy.n:
        raise ValueError(
            f"local.preservation_policy {policy!r} is not supported: RAM keeps the newest steps;"
            " set max_to_keep, or give LatestN with a number"
        )
    return policy.n


def merged_with(settings: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the user's ``further`` ones, which have precedence.

    Of ``keep_last_n`` and ``preservation_policy``, one among ``further`` replaces also the other
    one of ``settings``.
    """
    merged = {**settings, **further}
    for name, other in (_KEPT, _KEPT[::-1]):
        if further.get(name) is not None and other not in further:
            merged.pop(other, None)
    return merged


def with_further(settings: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the user's ``further`` ones, which have precedence.

    An interval in place of a policy leaves preemptions to ``on_preemption``, which is then "save".
    """
    merged = merged_with(settings, further)
    given = [further[name] for name in ("local_save_every", "save_every") if name in further]
    if any(all(is_interval(part) for part in parts_of(every)) for every in given):
        merged["on_preemption"] = further.get("on_preemption", "save")
    return merged


def save_policy_of(tier: LocalCheckpointOptions | PersistentCheckpointOptions) -> PerProcessPolicy:
    """Return the save policy of a tier, with Orbax's defaults."""
    if tier.save_decision_policy is not None:
        return PerProcessPolicy(tier.save_decision_policy)
    if tier.should_save_fn is not None:
        rules: list[Any] = [ShouldSaveFunction(tier.should_save_fn)]
    else:
        rules = [ocm.FixedIntervalPolicy(tier.save_interval_steps), ocm.InitialSavePolicy()]
    rules.append(ocm.PreemptionCheckpointingPolicy())
    return PerProcessPolicy(cast(SavePolicy, ocm.AnySavePolicy(rules)))


def _check_one_rule(tier: LocalCheckpointOptions | PersistentCheckpointOptions) -> None:
    if tier.preservation_policy is not None and tier.max_to_keep is not None:
        raise ValueError("max_to_keep and preservation_policy are both set: use one")
