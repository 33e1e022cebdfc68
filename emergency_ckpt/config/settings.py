"""``Config``: every setting, declared once; filled in by the user, validated whole."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from emergency_ckpt.background import LOWEST_PRIORITY
from emergency_ckpt.config.agreement import shared_settings
from emergency_ckpt.config.policies import (
    PreservationPolicy,
    SavePlan,
    SavePolicy,
    plan_saves,
)
from emergency_ckpt.config.table import setting
from emergency_ckpt.config.validation import config_problems
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.core.placement.policies import (
    AllButPrimary,
    PlacementPolicy,
    parse_policy,
)
from emergency_ckpt.core.placement.writers import PersistentWriters, StorageCompression
from emergency_ckpt.core.restore.majority import OnDivergence
from emergency_ckpt.core.save.snapshot_plan import (
    SnapshotMode,
    SnapshotSettings,
    StagingMemory,
)
from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.core.save.timing import AdaptiveInterval
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.event_log.writer import MIN_LOG_BYTES, launcher_directory
from emergency_ckpt.events import Listener
from emergency_ckpt.types import Security

MEBIBYTE = 1 << 20

HostStateRemap = Callable[[Sequence[Any], int, int], Any]
"""``remap(payloads of all saved processes, process_index, process_count) -> payload``."""


@dataclasses.dataclass(kw_only=True)
class Config:
    """All settings of an ``EmergencyCheckpointer``. ``docs/configuration.md`` has them as a table.

    Each must be equal on all processes but for those with ``may_differ``; the start compares them.
    """

    dir: str | None = setting(None, tier="persistent", least=1)
    r"""Directory of the persistent tier, an absolute path or a URL that etils.epath can reach,
    without ``\``, ``*``, ``?`` and ``[``. None: local tier only."""
    local_dir: str = setting("", tier="local", may_differ=True)
    """Directory on this host's ramdisk (tmpfs)."""
    run_id: str | None = None
    """Name of the run; what lies in ``local_dir`` under another name is never restored. None:
    derived from ``dir``."""
    mesh: jax.sharding.Mesh | None = None
    """Device mesh of the training state. None: taken from the state's own shardings where
    slices matter, which needs ``slice_index`` on the devices; else everything is one slice."""
    replica_axis: str | int | None = setting(0, orbax="replica_axis_index")
    """Name or index of the mesh axis along which slices are replicas. None: the first axis along
    which no leaf of the state is split; without one everything is one slice."""
    local_save_every_n_steps: int = setting(10, tier="local")
    """Interval of the local tier, in steps; 0 for none."""
    save_every_n_steps: int = setting(1000, tier="persistent", needs="dir")
    """Interval of the persistent tier, in steps; 0 for none."""
    local_save_every_n_seconds: float | None = setting(None, tier="local")
    """Interval of the local tier on the leader's clock, agreed by all in the background; besides
    the one in steps. A tier with no interval and no policy is off."""
    save_every_n_seconds: float | None = setting(None, tier="persistent", needs="dir")
    """The same for the persistent tier."""
    local_save_policy: SavePolicy | AdaptiveInterval | None = setting(None, tier="local")
    """Policy of the local tier instead of its intervals: an object of Orbax's
    ``SaveDecisionPolicy``, a user's own subclass, or ``AdaptiveInterval``; several in an
    ``AnySavePolicy``. A decision that depends on clocks or on a save under way is the leader's, and
    is agreed in the background."""
    save_policy: SavePolicy | AdaptiveInterval | None = setting(
        None, tier="persistent", needs="dir"
    )
    """The same for the persistent tier."""
    local_keep_last_n: int = setting(1, tier="local", least=1, most=64)
    """Whole steps that the local tier has room for, besides the one being written; each takes as
    much RAM as the first."""
    keep_last_n: int | None = setting(None, tier="persistent", least=1)
    """Whole steps kept in the persistent tier; None keeps all."""
    keep_every_n_steps: int | None = setting(None, tier="persistent", least=1, needs="keep_last_n")
    """With ``keep_last_n``: steps kept besides, the multiples of this."""
    preservation_policy: PreservationPolicy | None = setting(
        None, tier="persistent", orbax="persistent.preservation_policy"
    )
    """Policy of what the persistent tier keeps, instead of the two before: an object of Orbax's
    ``PreservationPolicy`` or a user's own. The last whole step always stays."""
    local_preservation_policy: PreservationPolicy | None = setting(None, tier="local")
    """The same for the local tier, which has one slot more than ``local_keep_last_n``: the newest
    whole step always stays, older ones until their slot is written again. What a policy does not
    want is dropped as soon as a newer one is complete."""
    async_save: bool = setting(True, may_differ=True, orbax="enable_async_checkpointing")
    """False: ``save`` returns when the step is whole, or has failed."""
    save_on_preemption: bool = True
    """At the sync point of a preemption notice (SIGTERM) save in both tiers, whatever the policies.
    False: only where a policy is or has ``PreemptionCheckpointingPolicy``; without any, notices are
    left to others."""
    preemption_notice: str | Callable[[], object] | tuple[str | Callable[[], object], ...] = (
        setting("sigterm", may_differ=True)
    )
    """Source of notices besides SIGTERM, which always is one, or a tuple of some: "ray" (Ray
    Train), "gce" (the metadata server), "file:" and a path, or a function without arguments that is
    polled in the background and returns a true value. See docs/operations.md."""
    exit_on_preemption: bool = False
    """End the process in ``save`` at the sync point, once the step is written, by ``SystemExit``
    with status 143."""
    save_on_stop: bool = False
    """At a good end (``stop``, or the end of the ``with`` block without an exception) save the step
    that ``save`` was last called with in each tier that does not have it, whether it was due or
    not. A notice within the last second, which nobody has seen yet, costs no step then. Each
    ``save`` captures the host state, and the state of the last one is held: device memory of one
    state, where the caller drops it without donating it."""
    preemption_grace_s: float = setting(25.0, may_differ=True)
    """Time from the sync point to the kill. What is not written by then is named in the log; the
    local tier comes first."""
    persistent_writers: PersistentWriters = setting("primary", tier="persistent")
    """``"primary"``: the first slice alone writes the persistent tier, and the others have no
    traffic. ``"striped"``: every slice writes its part of the one copy, through its own network
    cards; leaves that the number of slices does not divide along any axis are written by the first
    slice. What is stored is a plain Orbax step either way."""
    placement: PlacementPolicy = setting(AllButPrimary(), tier="local")
    """Choice of the slices that store each shard in the local tier, as a policy or its text:
    ``"all_but_primary"``: all of them on every slice but the first; ``"striped(2)"``: each on two,
    so that a process transfers, keeps and writes less. See ``eckpt plan-placement``."""
    host_state_buddies: int | None = setting(None, tier="local")
    """Processes on other slices that keep a copy of a host state; None: one on every other
    slice."""
    host_state_limit_bytes: int = setting(16 * MEBIBYTE, least=1, most=MAX_HOST_STATE_BYTES)
    """Largest encoded host state of a process; at most 64 MiB, what a peer takes."""
    host_state_remap: HostStateRemap | None = None
    """Makes a process's host state out of those of a job of another size: one of
    ``emergency_ckpt.remaps``, or a function of ``(all former ones, process, count)``."""
    allow_missing_host_state: bool = setting(False, tier="persistent")
    """Start from a step that plain Orbax wrote, with the non-tensor state as it is; else such a
    step is an error where ``restore`` is given a host state."""
    take_over_dir: bool = setting(False, tier="persistent")
    """Save in ``dir`` although another run's name lies there, in whose place this one's is put,
    once; what that run still saves there fails from then on. For one start."""
    on_divergence: OnDivergence = setting("warn", tier="local")
    """Action of a restore where replicas of a shard in RAM differ and no bytes are held by more
    than half of its holders. "warn": it goes on, each process with its own copy where it has one,
    and the event ``divergence`` names step, leaf and holders. "stop": ReplicasDiffer on all
    processes; no older step is taken instead. Where there is a majority its bytes are restored in
    either case. Only differences are settled: see docs/security.md."""
    orbax_item: str | None = setting(None, tier="persistent", least=1)
    """Of steps that plain Orbax wrote, the item that is the state; None: the item ``default``,
    ``state`` or ``items``, the only one that has arrays, or several together as a dict of them
    (``{"params": ..., "opt": ...}``)."""
    require_storage: bool = setting(False, tier="persistent", needs="dir")
    """End the start with an error when a small file cannot be written, read and removed in ``dir``.
    False: that is a warning, the event ``start.warning``, and the start does not wait for it.
    Nothing is tried in a job that does not save to ``dir``."""
    require_signed: bool = False
    """Restore only what was signed with the secret that this job was given. Else a step of ``dir``
    that is not, as those of plain Orbax, is restored and named, by the event ``restore.unsigned``.
    Needs ``secret_file`` or ECKPT_SECRET. See docs/security.md."""
    storage_compression: StorageCompression = setting("none", tier="persistent")
    """Compression of the arrays of the steps written from now on. ``"zstd"``, which plain Orbax
    uses, saves some 8% of float32 weights and takes several times as long, both ways. Steps of
    either kind are restored."""
    storage_buffer_bytes: int = setting(
        2048 * MEBIBYTE, tier="persistent", may_differ=True, least=1
    )
    """How much of a process's arrays may be on its way to or from the persistent directory at once;
    a larger array goes alone."""
    bind_host: str | None = setting(None, tier="local", may_differ=True, least=1, most=253)
    """Address on which this process serves its shards to peers. None: that by which this host
    reaches the job's coordinator, which is 127.0.0.1 in a job on one machine."""
    bind_port: int = setting(0, tier="local", may_differ=True, most=65535)
    """Port for it; 0 takes a free one."""
    secret_file: str | None = setting(None, may_differ=True, least=1)
    """File with the run's secret (32 to 4096 bytes, closed to others, such as a mounted credential
    of the cluster); else the environment's ECKPT_SECRET; else that of `eckpt launch`; else the
    processes make one up, and the start warns."""
    require_secret: bool = False
    """A start for which the processes would make up a secret is a ConfigError."""
    transfer_security: Security = setting("mac", tier="local")
    """How peers protect what travels between them; every frame of control is authenticated in each
    mode. "mac": bytes of shards are authenticated too. "aead": all is encrypted (AES-256-GCM).
    "crc": bytes of shards travel as they are, for a network that is trusted by other means. See
    docs/security.md."""
    extra_holders: tuple[str, ...] = setting((), tier="local")
    """Addresses of ``eckpt serve`` on hosts whose trainer is not part of this job, ``"host:port"``,
    or ``"identity@host:port"`` as it prints it: then no other server counts, nor that one after a
    new start. A name with several addresses stands for a server at each."""
    snapshot_mode: SnapshotMode = setting("auto", may_differ=True)
    """How a save takes the state off the devices; the state may be donated when ``save`` returns in
    each. "wait": the training thread waits until all bytes have left the devices, which takes no
    device memory; on CPU, until they are copied to the slot, so that the next step need not write
    to fresh memory. "device_copy": leaves are copied on their devices first, as many as
    ``device_copy_bytes`` allows, the largest first; the training thread waits for the other leaves
    only. "auto": "wait"; on CPU the arrays' buffers are shared and nothing is waited for."""
    device_copy_bytes: int = setting(0, may_differ=True)
    """Device memory, of each device, for copies that are not transferred yet. While those of one
    save fill it, another save waits."""
    staging_bytes: int = setting(256 * MEBIBYTE, tier="local", may_differ=True, least=1)
    """Host memory, beyond the slots, through which a save to the local tier passes; a larger shard
    goes alone. All of the state at once takes host memory where a save to the persistent tier is on
    its way, and where a save was begun before the leader's decision."""
    staging_memory: StagingMemory = setting("auto", may_differ=True, internal=True)
    """Host memory that shards are transferred to: "pinned_host", "pageable" (JAX's own transfer),
    or "auto": pinned where the device has it, and on CPU none, for views need none."""
    copy_threads: int | None = setting(None, tier="local", may_differ=True, least=1, most=256)
    """Threads that copy and check; None: 2, or 1 on a one-core machine."""
    copy_batch_bytes: int = setting(
        1024 * MEBIBYTE, tier="local", may_differ=True, least=1, internal=True
    )
    """Bytes per native copy call."""
    save_niceness: int = setting(10, may_differ=True, most=LOWEST_PRIORITY)
    """0 to 19, how much later than training the kernel runs the threads that save where cores are
    short (as nice(1)). With 0 they compete as equals."""
    transfer_streams: int = setting(2, tier="local", may_differ=True, least=1)
    """Connections per source when shards are fetched."""
    ramdisk_wait_s: float | None = setting(None, tier="local", may_differ=True, least=0)
    """Longest wait of a start for an earlier life of the run that still holds its directory on this
    host; then it is an error. 0: an error at once. None: most of ``start_timeout_s``, which is also
    the longest."""
    other_runs_grace_s: float = setting(86400.0, tier="local", may_differ=True)
    """Seconds for which the directory of another run in ``local_dir`` must have been left alone
    before it may be removed. It is removed only when the room is needed, the oldest first."""
    start_timeout_s: float = setting(
        120.0, may_differ=True, orbax="multiprocessing_options.coordination_timeout_secs"
    )
    """Deadline of the whole start."""
    restore_timeout_s: float = setting(600.0, may_differ=True)
    """Deadline of a whole restore."""
    save_timeout_s: float = setting(
        120.0, may_differ=True, orbax="multiprocessing_options.coordination_timeout_secs"
    )
    """Longest wait of ``save`` for the save before it, and of a save for its vote."""
    persistent_timeout_s: float = setting(
        1800.0, tier="persistent", may_differ=True, orbax="async_options.timeout_secs"
    )
    """Longest time of one stage of a persistent save."""
    storage_wait_timeout_s: float = setting(5.0, tier="persistent", may_differ=True)
    """Longest wait of ``save`` for the previous persistent save; then it skips this one. To be
    raised where no step may be skipped: training waits for storage then."""
    exit_timeout_s: float = setting(30.0, may_differ=True)
    """Longest wait for saves under way when an exception leaves the ``with`` block."""
    transfer_timeout_s: float = setting(30.0, tier="local", may_differ=True)
    """Longest silence of a peer; then a restore asks other holders, and the same one again until
    ``restore_timeout_s``. A process that is silent for longer than ``heartbeat_timeout_seconds`` of
    ``jax.distributed.initialize`` (JAX's default: 100) makes JAX abort all processes: keep that
    longer than this."""
    event_log: str | None = setting(None, may_differ=True, least=1)
    """Directory for the events of each process (docs/operations.md). None: that of ``eckpt
    launch``, if it started this process. "off": none there either."""
    event_log_limit_bytes: int = setting(256 * MEBIBYTE, may_differ=True, least=MIN_LOG_BYTES)
    """Largest size of one process's files there; the oldest events go first."""
    hang_timeout_s: float | None = None
    """Longest time without a step, from the first one on; then all processes dump their stacks and
    end with status 124. None: no limit. See docs/operations.md."""
    metrics_port: int | None = setting(None, may_differ=True, most=65535)
    """Port of this process's metrics for Prometheus (extra ``metrics``), at ``bind_host``, without
    one at 127.0.0.1; each process of a host needs its own. 0: a free one (``start.metrics``)."""
    on_event: Listener | None = setting(None, may_differ=True)
    """Called with each ``events.Event``, in the thread that emits it."""

    if not TYPE_CHECKING:  # a type checker finds unknown names by itself, unless it sees this

        def __setattr__(self, name: str, value: object) -> None:
            """ConfigError for a name that is no setting: it would be ignored."""
            if name not in _setting_names():
                raise ConfigError([_unknown(name)])
            super().__setattr__(name, value)

    def set(self, **settings: Any) -> Config:
        """Change settings in place; returns the config, so that calls can be chained.

        Raises:
          ConfigError: a name that is no setting; nothing is changed then.
        """
        unknown = sorted(set(settings) - _setting_names())
        if unknown:
            raise ConfigError([_unknown(name) for name in unknown])
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
            event_log=_as_text(self.event_log) or launcher_directory(os.environ),
            placement=_as_policy(self.placement),
        )
        problems = config_problems(config)
        if problems:
            raise ConfigError(problems)
        threads = config.copy_threads or min(2, os.cpu_count() or 1)
        run_id = config.run_id or run_id_of(config.dir or "")
        return dataclasses.replace(
            config, run_id=run_id, copy_threads=threads, extra_holders=tuple(config.extra_holders)
        )

    @property
    def run_name(self) -> str:
        """The run id of a validated config, which has one."""
        assert self.run_id is not None, "only a validated config is asked"
        return self.run_id

    @property
    def snapshots(self) -> SnapshotSettings:
        """The settings by which this process takes snapshots."""
        return SnapshotSettings(
            self.snapshot_mode, self.device_copy_bytes, self.staging_bytes, self.staging_memory
        )

    def save_plans(self) -> dict[TierName, SavePlan]:
        """Return the schedule of each tier that is on, the local one first."""
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
    def longest_wait_s(self) -> float:
        """The longest that saves under way may take, with the removal of old steps."""
        return 4 * self.save_timeout_s + 4 * self.persistent_timeout_s

    @property
    def longest_save_wait_s(self) -> float:
        """The longest that ``save`` may wait: for saves before it, and for its own bytes."""
        short_s = 2 * self.save_timeout_s + self.storage_wait_timeout_s
        is_short = self.async_save and not self.exit_on_preemption
        return short_s if is_short else self.longest_wait_s

    @property
    def heeds_preemption(self) -> bool:
        """True when a preemption notice causes a save or an exit."""
        asked_for = any(plan.on_preemption for plan in self.save_plans().values())
        return self.save_on_preemption or asked_for

    def shared_settings(self) -> dict[str, str]:
        """Return what all processes of a job must have set alike, as texts by name."""
        return shared_settings(self)


@functools.cache
def _setting_names() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(Config))


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, sorted(_setting_names()), 1)
    return f"{name!r} is not a setting" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def run_id_of(directory: str) -> str:
    """A run id that belongs to the persistent directory: its last name and a digest of it all."""
    stripped = directory.rstrip("/")
    if "://" not in stripped:
        stripped = os.path.abspath(stripped)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stripped.rsplit("/", maxsplit=1)[-1])[:40] or "run"
    return f"{name}-{hashlib.sha256(stripped.encode()).hexdigest()[:16]}"


def _as_text(path: Any) -> Any:
    """Path objects as their text; what is neither is left for ``config_problems`` to name."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _as_policy(placement: Any) -> Any:
    """A placement from its text; a text that is none is left for ``config_problems`` to name."""
    with contextlib.suppress(ConfigError):
        return parse_policy(placement) if isinstance(placement, str) else placement
    return placement
