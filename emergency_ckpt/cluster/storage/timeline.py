"""The timeline in storage, where rolled-back steps are moved aside."""

from __future__ import annotations

from collections.abc import Callable

from absl import logging

from emergency_ckpt.cluster.storage.claim import DirectoryClaim
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CheckpointError, DirectoryInUse
from emergency_ckpt.events import EventSink
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.types import SaveId

_SOON_S = 30.0
"""Maximum wait for each call to storage at the end of a restore."""


class StorageTimeline:
    """Applies this process's timeline to storage. For one thread at a time; blocks.

    The first writer does so as part of each save, until it is done. A job that does not save to
    storage changes nothing, because it may read a directory that another job writes.
    """

    def __init__(
        self, tier: PersistentTier, timelines: Timelines, events: EventSink, claim: DirectoryClaim
    ) -> None:
        self._tier = tier
        self._claim = claim
        self._timelines = timelines
        self._events = events
        self._followed: Timeline | None = None

    def claim(self) -> None:
        """Claim the directory. PersistentTierError; DirectoryInUse when this run may not save."""
        self._claim.hold()

    def follow(self) -> None:
        """Move aside the steps outside the timeline. PersistentTierError, CorruptData."""
        self._follow(self._tier)

    def follow_soon(self) -> None:
        """Call ``follow`` at the end of a restore. If storage fails, the next save does it."""
        try:
            tier = self._tier.with_timeout(_SOON_S)
            bound = self._timelines.bound
            if bound is not None and bound != self._followed:
                self._claim.hold(tier)
            self._follow(tier)
        except DirectoryInUse as error:
            logging.warning("rolled-back steps are not moved aside: %s", error)
            self._events.emit("persistent.in_use", reason=str(error)[:500])
        except CheckpointError as error:
            logging.warning("rolled-back steps are not moved aside yet: %s", error)
            self._events.emit("persistent.unreachable", reason=str(error)[:500])

    def _follow(self, tier: PersistentTier) -> None:
        bound = self._timelines.bound
        if bound is None or bound == self._followed:
            return
        for step, kept_as in tier.changes.follow(bound):
            self._tell(step, kept_as, "it was rolled back")
        self._followed = bound

    def leads_to(self, save: SaveId, stored: SaveId) -> bool:
        """Return whether ``stored`` was made in the life of ``save``, or on the path to it."""
        return self._timelines.leads_to(save, stored)

    def make_room(self, save: SaveId) -> None:
        """Make sure that ``save`` can be written without losing the step in its place.

        Other rolled-back steps count until the save is complete, unless the user asked for an older
        step, because after a crash in between they are still the best.
        """
        if self._timelines.is_demanded:
            self.follow()
        self._events.emit("persistent.removing", step=save.step)
        reason = f"incarnation {save.incarnation} saved the step again"
        kept_as = self._tier.changes.make_room(save.step, reason)
        if kept_as is not None:
            self._tell(save.step, kept_as, reason)

    def publish(self, save: SaveId, set_marker: Callable[[], None]) -> None:
        """Publish ``save`` with ``set_marker``, then retire the steps it replaces or passed over.

        PersistentTierError, CorruptData: also when the marker is set but retiring failed; the next
        save then repeats that part.
        """
        self._claim.renew()
        set_marker()
        self._events.emit("persistent.published", step=save.step)
        self._timelines.bind()
        self._tier.changes.end_replacement(save.step)
        self.follow()

    def note_complete(self) -> None:
        """Record in this process's RAM that a save is complete."""
        self._timelines.bind()

    def _tell(self, step: int, kept_as: str, reason: str) -> None:
        self._events.emit("persistent.set_aside", step=step, kept_as=kept_as, reason=reason)
