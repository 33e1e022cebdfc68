"""Parts that the saver works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from emergency_ckpt.background import Failures, copy_threads
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.preemption.watch import PreemptionWatch
from emergency_ckpt.cluster.process_placement import ProcessPlacement, copies_in_ram
from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.config import Config
from emergency_ckpt.config.policies import plan_text
from emergency_ckpt.core.save.save_rules import skip_reason
from emergency_ckpt.core.save.snapshot_plan import Buffers, SnapshotSettings
from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.errors import PeerAbsent, PeerLeft, SaveFailed
from emergency_ckpt.events import EventSink
from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.capture import CaptureParts
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.save.persistent.scratch_area import ScratchArea
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.types import SaveId


@dataclasses.dataclass(frozen=True)
class SaverParts:
    """Parts of the saver. ``persistent`` and ``preservation``: None without that tier.

    Attributes:
      inbox: what others push for the persistent saves of this process.
      before_save: called when a save of a step starts; gives what its background part does first,
        if anything.
      look: raises PeerLeft, or PeerAbsent, when a process is found that the training thread waits
        for in vain.
    """

    config: Config
    process: tuple[int, int]
    buffers: Buffers
    coordinator: Coordinator
    tier: LocalTier
    local: LocalSaves
    persistent: PersistentSaves | None
    preservation: Preservation | None
    watch: PreemptionWatch
    timelines: Timelines
    events: EventSink
    failures: Failures
    inbox: HostStateInbox
    before_save: Callable[[int], Callable[[], object] | None]
    look: Callable[[], None]


def snapshot_settings(parts: SaverParts) -> SnapshotSettings:
    """Return how this process takes snapshots."""
    config, buffers = parts.config, parts.buffers
    return SnapshotSettings(
        config.snapshot_mode,
        config.device_copy_bytes,
        buffers.staging_bytes,
        buffers.staging_memory,
    )


def capture_parts(parts: SaverParts) -> CaptureParts:
    """Return what the captures of this process for the persistent tier share."""
    config = parts.config
    return CaptureParts(
        scratch=ScratchArea(copy_threads()),
        keeps_lent=parts.tier.keeps_lent_for_storage,
        events=parts.events,
        copy_batch_bytes=parts.buffers.copy_batch_bytes,
        timeout_s=config.persistent_timeout_s,
    )


def start_facts(
    parts: SaverParts, placement: ProcessPlacement, schedules: Mapping[TierName, TierSchedule]
) -> dict[str, int | str]:
    """Fields of ``start.ready``. ``ram_bytes``: of the slots that this process reserves."""
    config, topology = parts.config, placement.topology
    plans = {name: schedule.plan for name, schedule in schedules.items()}
    slots = config.local_keep_last_n + 1 if "local" in plans else 0
    return {
        "processes": topology.process_count,
        "slices": len(topology.slices),
        "copies": copies_in_ram(config.placement, topology) if slots else 0,
        "slots": slots,
        "ram_bytes": slots * placement.layout.size_bytes,
        "local": plan_text(plans.get("local")),
        "persistent": plan_text(plans.get("persistent")),
        "dir": config.dir or "",
    }


def longest_wait_s(parts: SaverParts, name: TierName, *, must_exist: bool) -> float:
    """Return the longest wait of a save in tier ``name`` for the one before it."""
    config = parts.config
    if name == "local":
        return config.save_timeout_s
    # A slow bucket must not hold up training, nor with it the others' local saves. It is left out
    # and not made up for at a later step: which one that is, the processes would have to agree on.
    least_s = config.save_timeout_s if must_exist else 0.0
    return max(least_s, config.storage_wait_timeout_s)


def note_skipped(
    parts: SaverParts, name: TierName, save: SaveId, limit_s: float, *, is_again: bool
) -> None:
    """``is_again``: what is under way is a save of this very step; nothing is missed yet."""
    waits = False
    if name == "local":
        waits = parts.local.waits_for_others
    elif parts.persistent is not None:
        waits = parts.persistent.outcomes.is_learning
    _tell_skipped(parts, name, save)
    if is_again:
        return
    why = skip_reason(name, limit_s, waits_for_others=waits)
    target = f"step {save.step} to the {name} tier"
    parts.failures.record(SaveFailed("save", target, why.problem, hint=why.hint))
    parts.events.emit("save.skipped", step=save.step, tier=name, reason=why.problem)


def note_given_up(
    parts: SaverParts, name: TierName, save: SaveId, error: PeerLeft | PeerAbsent
) -> None:
    """``save`` is given up: a process that it waits for has died, or gives no sign of life."""
    _tell_skipped(parts, name, save)
    target = f"step {save.step} to the {name} tier"
    failure = SaveFailed("save", target, error.problem, hint=error.hint)
    failure.__cause__ = error
    parts.failures.record(failure)
    parts.events.emit("save.skipped", step=save.step, tier=name, reason=error.problem)


def _tell_skipped(parts: SaverParts, name: TierName, save: SaveId) -> None:
    if name == "local":
        parts.local.note_skipped(save)
    elif parts.persistent is not None:
        parts.persistent.note_skipped(save)
