"""Parts that the saver works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.config import Config
from emergency_ckpt.core.save.snapshot_plan import Buffers, SnapshotSettings
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.save.local_save import LocalSaves
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSaves
from emergency_ckpt.types import LOCAL, SaveId, TierName


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

    @property
    def snapshot_settings(self) -> SnapshotSettings:
        """Return how this process takes snapshots."""
        config, buffers = self.config, self.buffers
        return SnapshotSettings(
            config.snapshot_mode,
            config.device_copy_bytes,
            buffers.staging_bytes,
            buffers.staging_memory,
        )

    def saves(self, tier: TierName) -> LocalSaves | PersistentSaves | None:
        """Return what carries out the saves to ``tier``; None without that tier."""
        return self.local if tier == LOCAL else self.persistent

    def skip(self, tier: TierName, save: SaveId, why: SaveFailed | None) -> None:
        """Leave ``save`` out of ``tier`` on this process: the others are told in the background.

        ``why``: recorded; None when nothing is missed.
        """
        saves = self.saves(tier)
        if saves is not None:
            saves.note_skipped(save)
        if why is not None:
            self.failures.record(why)
            self.events.emit("save.skipped", step=save.step, tier=tier, reason=why.problem)
