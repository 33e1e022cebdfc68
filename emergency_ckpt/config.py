"""The configuration: one value, filled in by the user, validated whole when it is built."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from emergency_ckpt.core.placement import AllButPrimary, PlacementPolicy
from emergency_ckpt.core.save_agreement import TierName
from emergency_ckpt.core.save_timing import AdaptiveInterval
from emergency_ckpt.core.snapshot_plan import (
    SnapshotMode,
    SnapshotSettings,
    StagingMemory,
    snapshot_problems,
)
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.runtime.events import Listener
from emergency_ckpt.runtime.save_policies import (
    PreservationPolicy,
    SavePlan,
    SavePolicy,
    plan_saves,
    policy_identity,
    preservation_policy_problems,
    save_policy_problems,
)
from emergency_ckpt.transfer.wire import MAX_HOST_STATE_BYTES

MEBIBYTE = 1 << 20
_LONGEST_TIMEOUT_S = 1e7

HostStateRemap = Callable[[Sequence[Any], int, int], Any]
"""``remap(payloads of all saved processes, process_index, process_count) -> payload``."""


@dataclasses.dataclass(kw_only=True)
class Config:
    """All settings of an ``EmergencyCheckpointer``. Must be equal on all processes but where said.

    Attributes:
      dir: directory of the persistent tier, anything that etils.epath can reach. None: local tier
        only.
      local_dir: directory on this host's ramdisk (tmpfs). May differ between hosts.
      run_id: name of the run; what lies in ``local_dir`` under another name is never restored.
        None: derived from ``dir``.
      mesh: the device mesh of the training state. None: taken from the state's own shardings where
        slices matter, which needs ``slice_index`` on the devices; else everything is one slice.
      replica_axis: name or index of the mesh axis along which slices are replicas.
      local_save_every_n_steps: interval of the local tier, in steps; 0 for none.
      save_every_n_steps: interval of the persistent tier, in steps; 0 for none.
      local_save_every_n_seconds: interval of the local tier on the leader's clock, agreed by all in
        the background; besides the one in steps. A tier with no interval and no policy is off.
      save_every_n_seconds: the same for the persistent tier.
      local_save_policy: when the local tier saves, instead of its intervals: Orbax's
        ``SaveDecisionPolicy`` objects, a user's own subclass, or ``AdaptiveInterval``; several in
        an ``AnySavePolicy``. What depends on clocks or on a save being under way is decided by
        the leader and agreed in the background.
      save_policy: the same for the persistent tier.
      keep_last_n: whole steps kept in the persistent tier; None keeps all.
      keep_every_n_steps: with ``keep_last_n``: steps kept besides, the multiples of this.
      preservation_policy: what the persistent tier keeps, instead of the two before: an Orbax
        ``PreservationPolicy`` object or a user's own. The last whole step always stays.
      local_preservation_policy: the same for the local tier, of which two slots are all there is:
        the newest whole step always stays, the one before until its slot is written again. A
        policy that does not want that one has it dropped as soon as the newer one is complete.
      async_save: False: ``save`` returns when the step is whole, or has failed. May differ.
      save_on_preemption: at the sync point of a preemption notice (SIGTERM) save in both tiers,
        whatever the policies. False: only where a policy is or has
        ``PreemptionCheckpointingPolicy``; without any, notices are left to others.
      exit_on_preemption: end the process in ``save`` at the sync point, once the step is written,
        by ``SystemExit`` with status 143.
      preemption_grace_s: time from the sync point to the kill. What is not written by then is
        named in the log; the local tier comes first. May differ.
      placement: which slices store which shards in the local tier.
      host_state_buddies: processes on other slices that keep a copy of a host state; None: one on
        every other slice.
      host_state_limit_bytes: largest encoded host state of a process; at most 64 MiB, what a peer
        takes.
      host_state_remap: makes a process's host state out of those of a job of another size.
      allow_missing_host_state: start from a step that plain Orbax wrote, with the non-tensor state
        as it is; else such a step is an error where ``restore`` is given a host state.
      storage_buffer_bytes: how much of a process's arrays may be on its way to or from the
        persistent directory at once; a larger array goes alone. May differ.
      bind_host: address on which this process serves its shards to peers. May differ.
      bind_port: port for it; 0 takes a free one. May differ.
      secret_file: file with the run's secret; else the environment's ECKPT_SECRET; else the leader
        makes one up and shares it through the coordination service. The path may differ.
      extra_holders: addresses of ``eckpt serve`` on hosts whose trainer is not part of this job.
      snapshot_mode: how a save takes the state off the devices; the state may be donated when
        ``save`` returns in each. "wait": the training thread waits until all bytes have left the
        devices, which takes no device memory; on CPU, until they are copied to the slot, so that
        the next step need not write to fresh memory. "device_copy": leaves are copied on their
        devices first, as many as ``device_copy_bytes`` allows, the largest first; the training
        thread waits for the other leaves only. "auto": "wait"; on CPU the arrays' buffers are
        shared and nothing is waited for. May differ.
      device_copy_bytes: device memory, of each device, for copies that are not transferred yet.
        While those of one save fill it, another save waits. May differ.
      staging_bytes: host memory, beyond the slots, through which a save to the local tier passes;
        a larger shard goes alone. All of the state at once takes host memory where a save to the
        persistent tier is on its way, and where a save was begun before the leader's word. May
        differ.
      staging_memory: "pinned_host", "pageable" (JAX's own transfer), or "auto": pinned where the
        device has it, and on CPU none, for views need none. May differ.
      copy_threads: threads that copy and check; None: 2, or 1 on a one-core machine. May differ.
      copy_batch_bytes: bytes per native copy call. May differ.
      transfer_streams: connections per source when shards are fetched. May differ.
      start_timeout_s, restore_timeout_s: deadline of the start and of a restore, all of it. May
        differ.
      save_timeout_s: how long ``save`` may wait for the save before it, and a save for its vote.
        May differ.
      persistent_timeout_s: how long one stage of a persistent save may take. May differ.
      transfer_timeout_s: longest silence of a peer. May differ.
      on_event: called with each ``runtime.events.Event``, in the thread that emits it. May differ.
    """

    dir: str | None = None
    local_dir: str = ""
    run_id: str | None = None
    mesh: jax.sharding.Mesh | None = None
    replica_axis: str | int = 0
    local_save_every_n_steps: int = 10
    save_every_n_steps: int = 1000
    local_save_every_n_seconds: float | None = None
    save_every_n_seconds: float | None = None
    local_save_policy: SavePolicy | AdaptiveInterval | None = None
    save_policy: SavePolicy | AdaptiveInterval | None = None
    keep_last_n: int | None = None
    keep_every_n_steps: int | None = None
    preservation_policy: PreservationPolicy | None = None
    local_preservation_policy: PreservationPolicy | None = None
    async_save: bool = True
    save_on_preemption: bool = True
    exit_on_preemption: bool = False
    preemption_grace_s: float = 25.0
    placement: PlacementPolicy = dataclasses.field(default_factory=AllButPrimary)
    host_state_buddies: int | None = None
    host_state_limit_bytes: int = 16 * MEBIBYTE
    host_state_remap: HostStateRemap | None = None
    allow_missing_host_state: bool = False
    storage_buffer_bytes: int = 2048 * MEBIBYTE
    bind_host: str = "127.0.0.1"
    bind_port: int = 0
    secret_file: str | None = None
    extra_holders: tuple[str, ...] = ()
    snapshot_mode: SnapshotMode = "auto"
    device_copy_bytes: int = 0
    staging_bytes: int = 256 * MEBIBYTE
    staging_memory: StagingMemory = "auto"
    copy_threads: int | None = None
    copy_batch_bytes: int = 1024 * MEBIBYTE
    transfer_streams: int = 2
    start_timeout_s: float = 120.0
    restore_timeout_s: float = 600.0
    save_timeout_s: float = 120.0
    persistent_timeout_s: float = 1800.0
    transfer_timeout_s: float = 30.0
    on_event: Listener | None = None

    def set(self, **settings: Any) -> Config:
        """Change settings in place; returns the config, so that calls can be chained.

        Raises:
          ConfigError: a name that is no setting; nothing is changed then.
        """
        known = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError([f"{name!r} is not a setting" for name in unknown])
        for name, value in settings.items():
            setattr(self, name, value)
        return self

    def validated(self) -> Config:
        """A copy with derived values filled in.

        Raises:
          ConfigError: with every fault, not just the first.
        """
        config = dataclasses.replace(
            self,
            dir=_as_text(self.dir),
            local_dir=_as_text(self.local_dir),
            secret_file=_as_text(self.secret_file),
        )
        problems = list(_problems(config))
        if problems:
            raise ConfigError(problems)
        threads = config.copy_threads or min(2, os.cpu_count() or 1)
        run_id = config.run_id or run_id_of(config.dir or "")
        return dataclasses.replace(
            config, run_id=run_id, copy_threads=threads, extra_holders=tuple(config.extra_holders)
        )

    @property
    def snapshots(self) -> SnapshotSettings:
        """How this process takes snapshots."""
        return SnapshotSettings(
            self.snapshot_mode, self.device_copy_bytes, self.staging_bytes, self.staging_memory
        )

    def save_plans(self) -> dict[TierName, SavePlan]:
        """When each tier saves that is on, the local one first."""
        plans: dict[TierName, SavePlan] = {
            "local": plan_saves(
                self.local_save_policy,
                every_n_steps=self.local_save_every_n_steps,
                every_n_seconds=self.local_save_every_n_seconds,
            )
        }
        if self.dir is not None:
            plans["persistent"] = plan_saves(
                self.save_policy,
                every_n_steps=self.save_every_n_steps,
                every_n_seconds=self.save_every_n_seconds,
            )
        return {name: plan for name, plan in plans.items() if plan.is_on}

    @property
    def heeds_preemption(self) -> bool:
        """Whether anything is to happen at a preemption notice."""
        asked_for = any(plan.on_preemption for plan in self.save_plans().values())
        return self.save_on_preemption or asked_for

    def agreement(self) -> str:
        """Digest of what all processes of a job must have set alike."""
        shared = (
            self.dir,
            self.run_id,
            _mesh_identity(self.mesh),
            str(self.replica_axis),
            self.local_save_every_n_steps,
            self.save_every_n_steps,
            self.local_save_every_n_seconds,
            self.save_every_n_seconds,
            policy_identity(self.local_save_policy),
            policy_identity(self.save_policy),
            self.keep_last_n,
            self.keep_every_n_steps,
            policy_identity(self.preservation_policy),
            policy_identity(self.local_preservation_policy),
            (self.save_on_preemption, self.exit_on_preemption),
            repr(self.placement),
            self.host_state_buddies,
            self.host_state_limit_bytes,
            self.host_state_remap is None,
            self.allow_missing_host_state,
            tuple(self.extra_holders),
        )
        return hashlib.sha256(repr(shared).encode()).hexdigest()


_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def run_id_of(directory: str) -> str:
    """A run id that belongs to the persistent directory: its last name and a digest of it all."""
    stripped = directory.rstrip("/")
    if "://" not in stripped:
        stripped = os.path.abspath(stripped)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stripped.rsplit("/", maxsplit=1)[-1])[:40] or "run"
    return f"{name}-{hashlib.sha256(stripped.encode()).hexdigest()[:16]}"


def _as_text(path: Any) -> Any:
    """Path objects as their text; what is neither is left for ``_problems`` to name."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _mesh_identity(mesh: jax.sharding.Mesh | None) -> object:
    if mesh is None:
        return None
    return mesh.axis_names, mesh.devices.shape, [device.id for device in mesh.devices.flat]


def _problems(config: Config) -> list[str]:
    problems = _text_problems(config)
    if problems:
        # What follows takes them for texts.
        stand_ins = {name: "unset" if name == "run_id" else "/unset" for name, _ in problems}
        config = dataclasses.replace(config, **stand_ins)
    return [problem for _, problem in problems] + _value_problems(config)


def _text_problems(config: Config) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    for name in ("dir", "local_dir", "run_id", "bind_host", "secret_file"):
        value = getattr(config, name)
        optional = name in ("dir", "run_id", "secret_file")
        if not isinstance(value, str) and not (optional and value is None):
            problems.append((name, f"{name} must be a text, not {value!r}"))
    return problems


def _value_problems(config: Config) -> list[str]:
    problems: list[str] = []
    if not config.local_dir:
        problems.append("local_dir is not set (a directory on a tmpfs, e.g. /dev/shm/eckpt)")
    elif not Path(config.local_dir).is_absolute():
        problems.append(f"local_dir {config.local_dir!r} is not an absolute path")
    if config.dir is None and config.run_id is None:
        problems.append("neither dir nor run_id is set: nothing names the run")
    if config.dir is not None and not config.dir:
        problems.append("dir is empty")
    if config.run_id is not None and not _RUN_ID.fullmatch(config.run_id):
        problems.append(f"run_id {config.run_id!r} may only have letters, digits, '.', '_' and '-'")
    if config.dir is None and config.save_every_n_steps not in (0, 1000):
        problems.append("save_every_n_steps is set, but dir is not")
    problems += _not_below(config, 0, ("local_save_every_n_steps", "save_every_n_steps"))
    problems += _not_below(config, 1, ("host_state_limit_bytes", "copy_batch_bytes"))
    problems += _not_below(config, 1, ("storage_buffer_bytes",))
    problems += _not_below(config, 1, ("transfer_streams",))
    problems += snapshot_problems(config.snapshots)
    limit: Any = getattr(config, "host_state_limit_bytes")  # noqa: B009 - of any type still
    if isinstance(limit, int) and limit > MAX_HOST_STATE_BYTES:
        problems.append(
            f"host_state_limit_bytes must be at most {MAX_HOST_STATE_BYTES}, not {limit}:"
            " peers take no larger host state"
        )
    for name in ("keep_last_n", "keep_every_n_steps", "copy_threads"):
        if getattr(config, name) is not None:
            problems += _not_below(config, 1, (name,))
    problems += _policy_problems(config)
    if config.host_state_buddies is not None:
        problems += _not_below(config, 0, ("host_state_buddies",))
    problems += _timeout_problems(config)
    if _not_below(config, 0, ("bind_port",)) or config.bind_port > 65535:
        problems.append(f"bind_port {config.bind_port!r} is no port")
    problems += _mesh_problems(config)
    return problems


def _not_below(config: Config, least: int, names: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
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
    if config.preservation_policy is not None and config.keep_last_n is not None:
        problems.append("preservation_policy and keep_last_n are both set")
    for name in ("async_save", "save_on_preemption", "exit_on_preemption"):
        if not isinstance(getattr(config, name), bool):
            problems.append(f"{name} must be True or False, not {getattr(config, name)!r}")
    return problems


def _timeout_problems(config: Config) -> list[str]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    optional = ("local_save_every_n_seconds", "save_every_n_seconds")
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
    if config.mesh is None:
        return []
    axes = config.mesh.axis_names
    axis = config.replica_axis
    if isinstance(axis, str) and axis not in axes:
        return [f"replica_axis {axis!r} is not one of the mesh's axes {axes}"]
    if isinstance(axis, int) and not 0 <= axis < len(axes):
        return [f"replica_axis {axis} is out of range for the mesh's axes {axes}"]
    return []
