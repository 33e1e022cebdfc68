"""``Config``: every setting, declared once; filled in by the user, validated as one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import functools
import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import jax

from emergency_ckpt.config.policies import (
    PreservationPolicy,
    SaveEvery,
    SavePlan,
    plan_saves,
    policy_identity,
)
from emergency_ckpt.config.table import NO_SETTING, setting, settings_table
from emergency_ckpt.config.validation import (
    config_problems,
    listeners_of,
    made_observer,
    save_problems,
)
from emergency_ckpt.core.placement import AllButPrimary, PlacementPolicy
from emergency_ckpt.core.save.save_rules import NonFinite
from emergency_ckpt.core.save.snapshot_plan import DeviceReads
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.observer import OnEvent
from emergency_ckpt.paths import plain_path, resolved
from emergency_ckpt.types import HostStateRemap, OnPreemption, Requirement, TierName

if TYPE_CHECKING:
    from emergency_ckpt.config.keywords import Settings

OBSERVERS_VARIABLE = "ECKPT_OBSERVERS"
"""Variable with the texts of extras that observe every checkpointer of a program."""
_LOCAL_DIRECTORY = "/dev/shm/eckpt"  # noqa: S108 - every Linux has this ramdisk


def run_id_of(directory: str) -> str:
    """Return the run id of a persistent directory: its last name and a digest of its whole path."""
    stripped = resolved(directory)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stripped.rsplit("/", maxsplit=1)[-1])[:40] or "run"
    return f"{name}-{hashlib.sha256(stripped.encode()).hexdigest()[:16]}"


def default_local_dir(environ: Mapping[str, str]) -> str:
    """Return the directory in RAM of a job that names none: ECKPT_LOCAL_DIR, else one of the user.

    Each user of a host has a directory, because a directory in RAM is closed to all but its owner.
    """
    return environ.get("ECKPT_LOCAL_DIR") or f"{_LOCAL_DIRECTORY}-{os.geteuid()}"


def as_text(path: Any) -> Any:
    """Return the text of a path object, and the path of a ``file:///`` URL.

    Any other value as it is, for the validation to name.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    return plain_path(text) if isinstance(text, str) else text


def _saves(local_save_every: Any) -> bool:
    """Return whether the local tier is on; False for an invalid rule, which the checks name."""
    is_valid = not any(save_problems("local_save_every", local_save_every))
    return is_valid and plan_saves(local_save_every).is_on


def _as_policy(placement: Any) -> Any:
    """Return the placement policy of a text; an invalid text as it is, for the validation."""
    with contextlib.suppress(ConfigError):
        return parse_placement(placement) if isinstance(placement, str) else placement
    return placement


def _as_listeners(on_event: Any) -> list[Any]:
    """Return the listeners of ``on_event`` and ECKPT_OBSERVERS, with the observers of valid texts.

    Any other part as it is, for the validation to name.
    """
    given = [*listeners_of(on_event), *os.environ.get(OBSERVERS_VARIABLE, "").split()]
    for index, part in enumerate(given):
        with contextlib.suppress(ConfigError):
            given[index] = made_observer(part)
    return given


_SHOWN_CHARS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbaxFace:
    """The wishes of a face of Orbax, which no user has.

    Attributes:
      item: the item of Orbax with the training state, in the steps that are written (None:
        ``state``) and in those of plain Orbax. There None means the item ``default``, ``state`` or
        ``items``; else the only item with arrays; else all items with arrays, as a dict.
      step_name: the name of step 0, by which the folders of new steps are named: ``"00000000"`` for
        at least eight digits, ``"ckpt_0"`` for a prefix. Steps under any such name are read.
      waits_for_storage: ``save`` waits for the previous save to storage, and leaves none out.
      drops_older_steps: RAM drops the steps beyond ``local_keep_last_n`` as soon as a newer one is
        complete. False: an older step stays readable until a save takes its memory.
    """

    item: str | None = None
    step_name: str = "0"
    waits_for_storage: bool = False
    drops_older_steps: bool = False


@dataclasses.dataclass(kw_only=True)
class Config:
    """All settings of an ``EmergencyCheckpointer``. ``docs/configuration.md`` has them as a table.

    Each must be equal on all processes but for those with ``may_differ``; the start compares them.
    """

    dir: str | None = setting(None, least=1, basic=True)
    r"""Directory of the persistent tier: an absolute path, such as ``/mnt/checkpoints/run7``, also
    as ``file:///path``, or a URL that etils.epath can reach, such as ``gs://bucket/run7``, without
    ``\``, ``*``, ``?`` and ``[``. None: local tier only."""
    local_dir: str = setting("", may_differ=True, basic=True)
    """Directory on this host's ramdisk (tmpfs), such as ``/dev/shm/eckpt``. A job that saves
    nothing there may leave it out: a restore then uses ECKPT_LOCAL_DIR, else
    ``/dev/shm/eckpt-<user id>``."""
    replica_axis: str | int | None = setting(None, basic=True)
    """Name or index of the mesh axis along which slices are replicas, such as ``"data"``. None: the
    axis over several hosts that replicates the most bytes of the state; if ``dir`` is set, only an
    axis along which no leaf is split. A mesh without such an axis counts as one slice."""
    local_save_every: SaveEvery = setting(10, basic=True)
    """When to save to the local tier; 0: never. A number of steps, a ``datetime.timedelta`` of the
    leader's clock, a policy (Orbax's ``SaveDecisionPolicy``, a user's own, or
    ``extras.pace.AdaptiveInterval``), or a list of such rules, where a save is due as soon as one
    rule is due: ``[100, timedelta(minutes=1)]``."""
    save_every: SaveEvery = setting(1000, needs="dir", basic=True)
    """When to save to the persistent tier, as for ``local_save_every``: ``timedelta(hours=1)``. If
    both are 0 the job only reads ``dir``, as an evaluator does, and may run beside the job that
    saves."""
    mesh: jax.sharding.Mesh | None = setting(None)
    """Device mesh of ``replica_axis``, such as ``Mesh(devices, ("data", "model"))``. None: the
    slices of the devices (``slice_index``, on TPUs), else the mesh of the state's shardings."""
    run_id: str | None = setting(None)
    """Name of the run, such as ``"run7"``: files of another run in ``local_dir`` are never
    restored. None: a name derived from ``dir``."""
    local_keep_last_n: int = setting(1, least=1, most=64)
    """Number of complete steps that the local tier keeps, besides the one being written: 2 keeps a
    step to go back to. Each needs the same amount of RAM."""
    keep_last_n: int | None = setting(None, least=1, needs="dir")
    """Number of complete steps kept in the persistent tier, such as 5. None keeps all."""
    keep_every_n_steps: int | None = setting(None, least=1, needs="keep_last_n")
    """With ``keep_last_n``: multiples of this number, such as 10,000, are kept as well."""
    preservation_policy: PreservationPolicy | None = setting(None, needs="dir")
    """Policy that selects the steps to keep in the persistent tier, instead of ``keep_last_n`` and
    ``keep_every_n_steps``: an Orbax ``PreservationPolicy``, such as ``EveryNSteps(10_000)``, or a
    user's own. The last complete step is always kept."""
    async_save: bool = setting(True, may_differ=True)
    """False: ``save`` returns when the step is complete or has failed, as in a test of a loop."""
    on_preemption: OnPreemption = setting("save")
    """What a notice of a preemption, such as SIGTERM, causes. "save": one save to both tiers by all
    processes. "exit": the same, after which ``save`` raises ``SystemExit`` with status 143.
    "ignore": nothing, unless a tier has a ``PreemptionCheckpointingPolicy``."""
    preemption_grace_s: float = setting(25.0, may_differ=True)
    """Time from the notice to the kill, such as 25 where Kubernetes allows 30. The save to the
    local tier comes first; a save that is not complete by then is named in the log."""
    placement: PlacementPolicy = setting(AllButPrimary())
    """Slices that store each shard in the local tier, as a policy or its text.
    ``"all_but_primary"``: all slices but the first; of two slices, both. ``"striped(2)"``: two
    slices for each shard, so that a process transfers and stores less. ``eckpt plan`` compares
    them."""
    host_state_remap: HostStateRemap | None = setting(None)
    """Function of ``(all former host states, process, count)`` that returns the host state of a
    process when the number of processes has changed. docs/policies.md has one for Grain."""
    non_finite: NonFinite = setting("report")
    """"report": the event ``save.non_finite`` names leaves with NaN or infinite values that had
    none at an earlier save, or in the restored step. "off": nothing is counted."""
    require: Collection[Requirement] = setting(())
    """What the job must have, as in ``{"secret", "peers"}``; the start fails without. "secret": a
    secret that the job did not make up itself. "peers": an answer of this process's neighbour.
    "storage": a small file that can be written, read and removed in ``dir``."""
    bind_host: str | None = setting(None, may_differ=True, least=1, most=253)
    """Address on which this process serves its shards to peers, such as ``"10.0.0.7"``. None: the
    address from which this host reaches the coordinator, or else the other hosts; 127.0.0.1 in a
    job on one machine."""
    bind_port: int = setting(0, may_differ=True, most=65535)
    """Port on which this process serves its shards, such as 9500. 0: a free port, which a job that
    only reads always takes."""
    secret_file: str | None = setting(None, may_differ=True, least=1)
    """File with the run's secret, such as ``/etc/eckpt/secret``: 32 to 4096 bytes, not readable by
    other users. None: the variable ECKPT_SECRET, else the secret of ``eckpt launch``, else one that
    the processes generate, with a warning."""
    device_copy_bytes: int | None = setting(None, may_differ=True)
    """Memory of each device for copies of the state, such as ``8 << 30``; 0: no copies. The
    training thread waits only for leaves that do not fit. None: at most half of the memory that was
    free throughout one interval between saves, as JAX's statistics show; 0 without statistics."""
    device_reads: DeviceReads = setting("auto", may_differ=True)
    """How arrays leave the devices. "auto": the way that a probe at the start found to work, which
    the event ``start.link`` names. "pinned_host", "pageable": JAX's own transfers. For
    "pinned_host" JAX allocates host memory that JAX never frees."""
    stall_timeout_s: float = setting(60.0, may_differ=True)
    """Longest time in which nothing moves, such as 120 on slow storage: a restore or a save to
    storage then ends with an error that names who stands still. docs/configuration.md lists the
    limits that follow from this one."""
    total_timeout_s: float = setting(14400.0, may_differ=True)
    """Longest time of a whole restore, or of a whole save to storage, such as ``4 * 3600``, however
    much moves."""
    on_event: OnEvent | Sequence[OnEvent] | None = setting(None, may_differ=True)
    """What is called with each ``events.Event``, in the thread that emits it: a function, an
    observer, its text, or a list of these: ``["event_log(/logs/run7)", "prometheus(9400)"]``. Texts
    in the variable ECKPT_OBSERVERS, separated by spaces, are added."""

    orbax: OrbaxFace = dataclasses.field(default=OrbaxFace(), metadata=NO_SETTING)
    """What a face of Orbax asks for."""

    if not TYPE_CHECKING:  # a type checker finds unknown names by itself, unless it sees this

        def __setattr__(self, name: str, value: object) -> None:
            """ConfigError for a name that is no setting: it would be ignored."""
            if name not in _setting_names():
                raise ConfigError([_unknown(name)])
            super().__setattr__(name, value)

    def set(self, **settings: Unpack[Settings]) -> Self:
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

    def validated(self) -> Self:
        """A copy with derived values filled in.

        Raises:
          ConfigError: with every fault, not just the first.
        """
        local_dir = as_text(self.local_dir)
        is_left_out = isinstance(local_dir, str) and not local_dir
        if is_left_out and self.dir is not None and not _saves(self.local_save_every):
            local_dir = default_local_dir(os.environ)
        config = dataclasses.replace(
            self,
            dir=as_text(self.dir),
            local_dir=local_dir,
            secret_file=as_text(self.secret_file),
            placement=_as_policy(self.placement),
            on_event=_as_listeners(self.on_event),
        )
        problems = config_problems(config)
        if problems:
            raise ConfigError(problems)
        run_id = config.run_id or run_id_of(config.dir or "")
        return dataclasses.replace(config, run_id=run_id, require=frozenset(config.require))

    @property
    def run_name(self) -> str:
        """The run id of a validated config, which has one."""
        assert self.run_id is not None, "only a validated config is asked"
        return self.run_id

    def save_plans(self) -> dict[TierName, SavePlan]:
        """Return the schedule of each tier that is on, the local one first."""
        plans: dict[TierName, SavePlan] = {"local": plan_saves(self.local_save_every)}
        if self.dir is not None:
            plans["persistent"] = plan_saves(self.save_every)
        return {name: plan for name, plan in plans.items() if plan.is_on}

    @property
    def only_reads(self) -> bool:
        """True of an evaluator: no tier saves, and there is storage to read.

        Such a job claims nothing on the ramdisk, and may run beside the job that saves.
        """
        return self.dir is not None and not self.save_plans()

    @property
    def time_limits(self) -> TimeLimits:
        """Limits of a restore, and of a save to storage."""
        return TimeLimits(min(self.stall_timeout_s, self.total_timeout_s), self.total_timeout_s)

    @property
    def start_timeout_s(self) -> float:
        """Deadline of the whole start.

        Of it, a start waits a quarter for storage that does not answer, and a restore that has
        nothing in RAM another half for what storage has.
        """
        return 2 * self.stall_timeout_s

    @property
    def save_timeout_s(self) -> float:
        """Maximum time ``save`` waits for the previous save to RAM, and a save for its vote."""
        return 2 * self.stall_timeout_s

    @property
    def storage_wait_timeout_s(self) -> float:
        """Maximum time ``save`` waits for the previous save to storage before it skips its own."""
        return self.total_timeout_s if self.orbax.waits_for_storage else 0.0

    @property
    def transfer_timeout_s(self) -> float:
        """Maximum silence of a peer. After it, a restore asks other holders, then the same again.

        Far shorter than ``heartbeat_timeout_seconds`` of ``jax.distributed.initialize`` (100 by
        default), after which JAX aborts all processes.
        """
        return min(self.stall_timeout_s / 2, 30.0)

    @property
    def longest_wait_s(self) -> float:
        """Maximum time of the saves in progress, with the removal of old steps."""
        return 4 * self.save_timeout_s + 3 * self.total_timeout_s

    @property
    def longest_capture_s(self) -> float:
        """Maximum time of ``save`` without its waits for saves in progress; beyond, it may hang.

        The copy for each tier has ``save_timeout_s``. The arrays have as long to be computed.
        """
        return 3 * self.save_timeout_s

    @property
    def exit_timeout_s(self) -> float:
        """Maximum wait for saves in progress when an exception leaves the ``with`` block."""
        return self.save_timeout_s / 4

    @property
    def saves_at_preemption(self) -> bool:
        """True when a preemption notice causes a save in both tiers, whatever the policies."""
        return self.on_preemption != "ignore"

    @property
    def heeds_preemption(self) -> bool:
        """True when a preemption notice causes a save in some tier."""
        asked_for = any(plan.on_preemption for plan in self.save_plans().values())
        return self.saves_at_preemption or asked_for

    def shared_settings(self) -> dict[str, str]:
        """Return what all processes of a job must have set alike, as texts by name.

        Equal texts are equal settings.
        """
        names = [row.name for row in settings_table(Config) if not row.may_differ]
        shared: dict[str, str] = {}
        for name in sorted([*names, "orbax"]):
            text = _identity(getattr(self, name))
            if len(text) > _SHOWN_CHARS:
                digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
                text = f"{text[:_SHOWN_CHARS]}... ({digest[:12]})"
            shared[name] = text
        return shared


@functools.cache
def _setting_names() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(Config))


_DROPPED = {
    "allow_missing_host_state": "for a step without host states call restore without host_state",
    "suspect_lives": "restore.suspect names a step that ends each life; go back with restore(step)",
    "keep_newer": "after restore(step) newer steps stay until the first save, and then are hidden",
    "snapshot_mode": "set device_copy_bytes; 0 makes no copies on the devices",
    "transfer_security": "every transfer is encrypted; set secret_file",
    "on_divergence": "the event 'divergence' names shards that differ; a restore takes one content",
    "preemption_notice": "add a source to on_event, such as 'notices(gce)'",
    "metrics_port": "add 'prometheus(9400)' to on_event, with the port",
    "event_log": "add 'event_log(/logs/run7)' to on_event, with the folder",
    "hang_timeout_s": "add 'hang(600)' to on_event, with the seconds",
    "start_timeout_s": "set stall_timeout_s: a start has twice as long",
    "save_timeout_s": "set stall_timeout_s: a save to RAM has twice as long",
    "transfer_timeout_s": "set stall_timeout_s: a silent peer has half as long, at most 30 s",
    "restore_timeout_s": "set total_timeout_s, the longest time of a restore or a save to storage",
    "persistent_timeout_s": "set total_timeout_s, the longest time of a save to storage",
    "storage_wait_timeout_s": "where no step may be skipped, call wait_until_finished before save",
    "orbax_item": "the state is the item 'state'; several items are restored as a dict of them",
    "step_name": "folders of steps are named by the number alone; other names are read",
    "save_on_preemption": "set on_preemption='save' (the default) or 'ignore'",
    "exit_on_preemption": "set on_preemption='exit'",
    "local_preservation_policy": "RAM keeps the newest steps: set local_keep_last_n",
    "persistent_writers": "the first slice writes to storage; the others have no traffic there",
    "extra_holders": "bring the RAM of hosts outside of the job to storage by 'eckpt drain'",
    "host_state_buddies": "one process on every other slice keeps a copy of a host state",
    "save_on_stop": "save the last step of the loop with save(..., force=True)",
    "take_over_dir": "'eckpt doctor --adopt --dir D --run-id R' gives a directory to another run",
    "storage_compression": "arrays are written without compression; steps with zstd are read",
    "todelete_subdir": "removed steps are deleted; to get them back, set the bucket's soft delete",
}
"""Settings that there were, and what to do instead."""


def _unknown(name: str) -> str:
    if name in _DROPPED:
        return f"the setting {name!r} is gone: {_DROPPED[name]}"
    nearest = difflib.get_close_matches(name, sorted(_setting_names()), 1)
    return f"{name!r} is not a setting" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def _identity(value: Any) -> str:
    """Return the text of a setting's value, the same on every process that has set the same."""
    if value is None or isinstance(value, bool | int | float | str | datetime.timedelta):
        return repr(value)
    if isinstance(value, jax.sharding.Mesh):
        devices = [device.id for device in value.devices.flat]
        return f"axes {value.axis_names} of {value.devices.shape}, devices {devices}"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_identity, cast('frozenset[object]', value))))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_identity(part) for part in value)})"
    if callable(value):
        return "a function"  # its name may change where nothing else does
    return repr(policy_identity(value))
