"""The chain of this process's life in the step log of the persistent directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from absl import logging

from emergency_ckpt.background import told_while
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.errors import CheckpointError, DirectoryInUse
from emergency_ckpt.events import EventSink
from emergency_ckpt.storage.steps.writer import DirectoryWriter
from emergency_ckpt.types import SaveId

SOON_S = 30.0
"""Maximum wait for each call to storage at the end of a restore."""


def told_of_wait(
    events: EventSink, directory: str, deadline_s: float
) -> AbstractContextManager[None]:
    """Tell what storage is asked for, and how long it may still take, while a block asks it."""

    def tell(left_s: float) -> None:
        text = (
            f"{directory} has not answered yet: it is asked for its step log and its steps, for"
            f" {left_s:.0f} s more at most"
        )
        events.emit("persistent.waiting", text=text, seconds_left=left_s)

    return told_while(tell, deadline_s)


class StoredChain:
    """Writes this life's chain with its saves. For one thread at a time; blocks.

    A job that does not save to storage changes nothing there, because it may read a directory that
    another job writes. Methods raise PersistentTierError, which is DirectoryInUse when this life
    may not write.

    Args:
      soon: a writer like ``writer`` whose calls to storage wait for ``SOON_S`` at most.
    """

    def __init__(
        self,
        writer: DirectoryWriter,
        soon: Callable[[], DirectoryWriter],
        timelines: Timelines,
        events: EventSink,
    ) -> None:
        self.writer = writer
        self._soon = soon
        self._timelines = timelines
        self._events = events

    def begin(self, save: SaveId) -> None:
        """Claim the directory for the life of ``save``.

        Other rolled-back steps count until the save is complete, unless the user asked for an older
        step, because after a crash in between they are still the best.
        """
        forced = self._timelines.bound if self._timelines.is_forced else None
        self.writer.begin(save.incarnation, forced)

    def make_room(self, save: SaveId) -> None:
        """Clear the step's place for ``save``; a step there counts until that is complete."""
        self.writer.make_room(save.step, f"incarnation {save.incarnation} saved the step again")

    def publish(self, entry: Entry) -> None:
        """List ``entry``, and make this life's chain binding.

        PersistentTierError also when the step is listed and moving those that it supersedes failed;
        the next save repeats that part.
        """
        self.writer.publish(entry, self._timelines.current)
        self._timelines.bind()
        self.writer.settle()

    def follow_soon(self, incarnation: str) -> None:
        """Roll storage back at the end of a restore of a requested step.

        If storage fails, the next save does it.
        """
        try:
            self._soon().begin(incarnation, self._timelines.bound)
        except DirectoryInUse as error:
            logging.warning("rolled-back steps are not moved aside: %s", error)
            self._events.emit("persistent.in_use", reason=str(error)[:500])
        except CheckpointError as error:
            logging.warning("rolled-back steps are not moved aside yet: %s", error)
            self._events.emit("persistent.unreachable", reason=str(error)[:500])

    def leads_to(self, save: SaveId, stored: SaveId) -> bool:
        """Return whether ``stored`` was made in the life of ``save``, or on the path to it."""
        return self._timelines.leads_to(save, stored)

    def note_complete(self) -> None:
        """Record in this process's RAM that a save is complete."""
        self._timelines.bind()
