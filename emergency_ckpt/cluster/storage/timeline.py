"""The timeline in storage: what was rolled back is moved aside there."""

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
"""Longest wait for each call to storage when a restore is to end."""


class StorageTimeline:
    """Has storage follow the timeline of this process. For one thread at a time; blocks.

    The first writer does, as part of each save, until it is done. Nothing is done by a job that
    does not save to storage: it may read what another one is writing.
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
        """See that this run may save there. PersistentTierError; DirectoryInUse when it may not."""
        self._claim.hold()

    def follow(self) -> None:
        """Move aside what the timeline does not have. PersistentTierError, CorruptData."""
        self._follow(self._tier)

    def follow_soon(self) -> None:
        """As ``follow``, at the end of a restore. Where storage fails the next save does it."""
        try:
            tier = self._tier.with_timeout(_SOON_S)
            bound = self._timelines.bound
            if bound is not None and bound != self._followed:
                self._claim.hold(tier)
            self._follow(tier)
        except DirectoryInUse as error:
            logging.warning("rolled-back steps stay in their place: %s", error)
            self._events.emit("persistent.in_use", reason=str(error)[:500])
        except CheckpointError as error:
            logging.warning("rolled-back steps are still in their place: %s", error)
            self._events.emit("persistent.unreachable", reason=str(error)[:500])

    def _follow(self, tier: PersistentTier) -> None:
        bound = self._timelines.bound
        if bound is None or bound == self._followed:
            return
        for step, kept_as in tier.changes.follow(bound):
            self._tell(step, kept_as, "it was rolled back")
        self._followed = bound

    def leads_to(self, save: SaveId, stored: SaveId) -> bool:
        """Whether ``stored`` was made in the life of ``save``, or on the way to it."""
        return self._timelines.leads_to(save, stored)

    def make_room(self, save: SaveId) -> None:
        """See that ``save`` can be written, and that nothing is lost of what is in its place.

        What else was rolled back goes on to count until the save is whole, unless the user asked
        for an older step: after a crash in between it is still the best there is.
        """
        if self._timelines.is_demanded:
            self.follow()
        self._events.emit("persistent.removing", step=save.step)
        reason = f"the step was saved anew by incarnation {save.incarnation}"
        kept_as = self._tier.changes.make_room(save.step, reason)
        if kept_as is not None:
            self._tell(save.step, kept_as, reason)

    def publish(self, save: SaveId, set_marker: Callable[[], None]) -> None:
        """Make ``save`` count, by ``set_marker``; then what it replaces or left behind does not.

        PersistentTierError, CorruptData: also where the marker is set, and storage could not be
        told the rest, which the next save tells it.
        """
        self._claim.renew()
        set_marker()
        self._events.emit("persistent.published", step=save.step)
        self._timelines.bind()
        self._tier.changes.end_replacement(save.step)
        self.follow()

    def note_complete(self) -> None:
        """A save is whole: this process's RAM is told."""
        self._timelines.bind()

    def _tell(self, step: int, kept_as: str, reason: str) -> None:
        self._events.emit("persistent.set_aside", step=step, kept_as=kept_as, reason=reason)
