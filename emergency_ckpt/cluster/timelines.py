"""Which life the job goes on with, on one process, and when that is binding for all saves."""

from __future__ import annotations

import threading

from absl import logging

from emergency_ckpt.core.timeline import Timeline, continued, is_on_way, life_of, newest
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.types import SaveId


class Timelines:
    """The timeline of this process: on record in its RAM. For any thread.

    A restore that asked for a step is binding at once, or, where it keeps what is newer, at its
    next save. One that took the newest whole step is binding when its first save is whole: until
    then a newer step that was passed over, and becomes whole again, is still the best there is.
    """

    def __init__(self, tier: LocalTier | None, events: EventSink) -> None:
        """``tier``: where it is on record; None: nowhere."""
        self._tier = tier
        self._events = events
        self._lock = threading.Lock()
        self._bound = None if tier is None else tier.timeline
        self._pending: Timeline | None = None
        self._is_demanded = False

    @property
    def is_demanded(self) -> bool:
        """Whether the user asked for the step that was restored, and to forget what is newer."""
        with self._lock:
            return self._is_demanded

    @property
    def bound(self) -> Timeline | None:
        """Return the binding timeline; None when no restore was ever binding."""
        with self._lock:
            return self._bound

    def begin(
        self, known: Timeline | None, parent: SaveId, incarnation: str, *, at_once: bool
    ) -> None:
        """A restore brought ``parent``, and the job saves as ``incarnation`` from now on.

        ``known``: the newest timeline of all processes and of storage.
        """
        with self._lock:
            before = newest(known, self._bound)
            is_news = before != self._bound
            self._bound = before
            self._pending = continued(before, parent, incarnation)
            self._is_demanded = at_once
        if at_once:
            self.bind()
        elif is_news and not self.objection(parent.step, parent.incarnation):
            self._record()

    def bind(self) -> None:
        """From now on what this life has left behind does not count. Idempotent; never raises."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            self._bound = pending
        self._record()

    def _record(self) -> None:
        bound = self.bound
        if self._tier is None or bound is None:
            return
        try:
            self._tier.follow(bound)
        except (CheckpointError, OSError) as error:
            # Other processes and storage have it too.
            logging.warning("the timeline is not on record here: %s", error)
            self._events.emit("restore.note", text=f"the timeline is not on record: {error}")

    def objection(self, step: int, incarnation: str) -> str:
        """Why a save does not count; empty when it does."""
        bound = self.bound
        return "" if bound is None else bound.objection(step, incarnation)

    def leads_to(self, save: SaveId, stored: SaveId) -> bool:
        """Whether ``stored`` was made in the life of ``save``, or on the way to it."""
        with self._lock:
            timeline = self._bound if self._pending is None else self._pending
        is_of_run = stored.run_id == save.run_id
        return is_of_run and is_on_way(stored, life_of(save.incarnation), timeline)
