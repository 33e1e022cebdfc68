"""The timeline of one process, the time when it becomes binding, and its record in storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable

from absl import logging

from emergency_ckpt.core.restore.inventory import RestoredSave
from emergency_ckpt.core.step_log import Entry
from emergency_ckpt.core.timeline import (
    Timeline,
    continued,
    is_on_way,
    life_of,
    newest,
    newest_step,
    number_of,
)
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import CheckpointError, DirectoryInUse, PersistentTierError
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.storage.directory_writer import DirectoryWriter
from emergency_ckpt.types import SaveId


class Timelines:
    """The timeline of this process, recorded in its RAM. Thread-safe.

    A restore of a requested step is binding when the next save begins, so that an evaluation, which
    saves nothing, changes nothing. A restore of the newest complete step is binding when its first
    save is complete: until then a newer step that was passed over and becomes complete again is
    still the best. The same holds for an incarnation that saves without a restore in a run that has
    steps: its timeline begins from nothing.
    """

    def __init__(
        self,
        tier: LocalTier,
        events: EventSink,
        newest_step: int = -1,
        complete: SaveId | None = None,
        on_nothing: Callable[[], None] = lambda: None,
        unread: str = "",
    ) -> None:
        """Begin with the recorded timeline.

        Args:
          tier: records the timeline.
          newest_step: the newest step known at the start of the job; -1 without any.
          complete: the newest save that any process had on record at the start as complete.
          on_nothing: called at a first save without a restore, where the run has no step.
          unread: why storage could not be read at the start, so that earlier lives may have greater
            numbers than this life; else empty.
        """
        self._tier = tier
        self._events = events
        self._on_nothing = on_nothing
        self._lock = threading.Lock()
        self._bound = tier.timeline
        self._pending: Timeline | None = None
        self._is_requested = False
        self._newest_step = newest_step
        self.complete = complete
        self._has_begun = False
        self._unread = unread

    @property
    def is_forced(self) -> bool:
        """True from the first save after a restore of a step that the user requested."""
        with self._lock:
            return self._is_requested and self._pending is None

    @property
    def bound(self) -> Timeline | None:
        """The binding timeline; None before the first binding restore."""
        with self._lock:
            return self._bound

    @property
    def current(self) -> Timeline | None:
        """The timeline of this incarnation, binding or not yet."""
        with self._lock:
            return self._bound if self._pending is None else self._pending

    def learn(self, timeline: Timeline | None, parent: SaveId) -> None:
        """Take over ``timeline``, the newest of all processes and of storage.

        ``parent`` is being restored: a timeline that excludes it is not recorded.
        """
        with self._lock:
            before = newest(timeline, self._bound)
            if timeline and before and number_of(timeline.head) == number_of(before.head):
                before = timeline  # of two lives with the same number, all take that of the plan
            is_news = before != self._bound
            self._bound = before
        if is_news and not self.rejection_reason(parent.step, parent.incarnation):
            self._record()

    def begin(self, parent: SaveId, incarnation: str, *, is_requested: bool) -> None:
        """Note that the job saves as ``incarnation`` from now on, since it restored ``parent``.

        After ``learn``, and only once all processes have settled: saves that a process makes under
        its earlier incarnation would be lost with the first of them that is complete.
        """
        with self._lock:
            self._pending = continued(self._bound, parent, incarnation)
            self._is_requested = is_requested
            self._has_begun = True
            self._unread = ""

    def note_continuation(self) -> None:
        """Note that there is nothing to restore, or that saves go on after the newest step."""
        with self._lock:
            self._has_begun = True

    def begin_unrestored(self, save: SaveId) -> None:
        """Begin from nothing, and warn, at the first save of an incarnation that restored nothing.

        Call before each save. In a run without steps there is no reason for a warning.
        PersistentTierError where storage could not be read at the start and nothing was restored:
        the next restore might take a life of a greater number, and not count steps of this life.
        """
        with self._lock:
            if self._unread:
                raise PersistentTierError(
                    "save",
                    f"step {save.step}",
                    "storage could not be read at the start, and nothing was restored since, so"
                    f" earlier steps of the run may be there ({self._unread})",
                    hint="restore before the first save, or start again once storage answers",
                )
            if self._has_begun:
                return
            self._has_begun = True
            newest_saved = self._newest_step
            tensors, _, complete = self._tier.held()
            saves = [manifest.save for manifest in tensors] + ([complete] if complete else [])
            newest_saved = max(newest_saved, newest_step(saves, self._bound))
            if newest_saved >= 0:
                self._pending = continued(None, None, save.incarnation)
        if newest_saved < 0:
            self._on_nothing()
            return
        self._events.emit("warning", cause="without_restore", step=save.step, newest=newest_saved)

    def bind(self) -> None:
        """Make the timeline binding: rolled-back saves stop counting. Idempotent; never raises."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            self._bound = pending
        self._record()

    def note_stored(self, save: SaveId) -> None:
        """Record in RAM that ``save`` is complete in storage. Never raises."""
        self._tier.note_stored(save)

    def _record(self) -> None:
        bound = self.bound
        if bound is None:
            return
        try:
            self._tier.follow(bound)
        except (CheckpointError, OSError) as error:
            # The other processes and storage record the timeline too.
            logging.warning("the timeline could not be recorded: %s", error)
            self._events.emit("restore.note", text=f"the timeline could not be recorded: {error}")

    def rejection_reason(self, step: int, incarnation: str) -> str:
        """Return why a save does not count; empty when it does."""
        bound = self.bound
        return "" if bound is None else bound.rejection_reason(step, incarnation)

    def leads_to(self, save: SaveId, stored: SaveId) -> bool:
        """Return whether ``stored`` is of the incarnation of ``save``, or of its ancestors."""
        is_of_run = stored.run_id == save.run_id
        return is_of_run and is_on_way(stored, life_of(save.incarnation), self.current)


SOON_S = 30.0
"""Maximum wait for each call to storage at the end of a restore."""
_FIRST_TOLD_S = 5.0


@contextlib.contextmanager
def told_of_wait(events: EventSink, directory: str, deadline_s: float) -> Generator[None]:
    """While inside, report what storage is asked for, and how long the answer may still take.

    First after 5 s, or a quarter of the time until ``deadline_s`` of ``time.monotonic`` where that
    is less; then at intervals that double.
    """
    ended = threading.Event()

    def tell() -> None:
        pause_s = min(_FIRST_TOLD_S, max(0.0, deadline_s - time.monotonic()) / 4)
        while not ended.wait(pause_s) and (left_s := deadline_s - time.monotonic()) > 0:
            text = (
                f"{directory} has not answered yet: it is asked for its step log and its steps, for"
                f" {left_s:.0f} s more at most"
            )
            events.emit("persistent.problem", cause="waiting", text=text, seconds_left=left_s)
            pause_s *= 2

    # A daemon: nothing is to be told once the interpreter ends.
    threading.Thread(target=tell, name="eckpt-told", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class StoredChain:
    """Writes this incarnation's chain with its saves. For one thread at a time; blocks.

    Methods raise PersistentTierError, which is DirectoryInUse when this incarnation may not write.

    Args:
      soon: a writer like ``writer`` whose calls to storage wait for ``SOON_S`` at most.

    Attributes:
      began_from: the save that was restored last, until a newer save is published here.
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
        self.timelines = timelines
        self._events = events
        self.began_from: SaveId | None = None
        self._unreadable: set[int] = set()

    def note_unreadable(self, steps: Iterable[int]) -> None:
        """Note stored steps whose files a restore could not read. No save is under way."""
        self._unreadable.update(steps)

    def begin(self, save: SaveId) -> None:
        """Claim the directory for the incarnation of ``save``.

        Rolled-back steps count until ``save`` is complete, because after a crash in between they
        are still the best. If the user asked for an older step, they do not count from now on.
        """
        forced = self.timelines.bound if self.timelines.is_forced else None
        self.writer.begin(save.incarnation, forced)

    def make_room(self, save: SaveId) -> None:
        """Clear the step's place for ``save``: remove a rolled-back step, never one that counts.

        A step that a restore could not read does not count if this life does not continue from it.
        """
        left_by = self.timelines.current if save.step in self._unreadable else None
        self.writer.make_room(save.step, self.timelines.bound, left_by)

    def publish(self, entry: Entry) -> None:
        """List ``entry``, and make this incarnation's chain binding.

        The steps that the chain excludes are hidden; where that fails, a later save tries again.
        """
        self.writer.publish(entry, self.timelines.current)
        self.began_from = None
        self.timelines.bind()
        self.writer.try_to_settle()

    def note_lives_soon(self, restored: RestoredSave) -> None:
        """Record how many lives in a row began from a save of storage, at the end of a restore.

        A failure is reported; training goes on, and the log lacks this life.
        """
        save = restored.save
        try:
            self._soon().note_lives(save.step, save.incarnation, restored.lives)
        except (CheckpointError, OSError) as error:
            began = count_text(restored.lives, "life in a row", "lives in a row")
            text = f"storage cannot record that {began} began from step {save.step}: {error}"
            logging.warning("%s", text)
            self._events.emit("restore.note", text=text[:500])

    def note_orderly_end(self) -> None:
        """Record that this life does not end because of the save that it began from."""
        if self.began_from is not None:
            self.note_lives_soon(RestoredSave(self.began_from, 0))

    def roll_back(self, save: SaveId) -> None:
        """Roll storage back at the first save after a restore of a requested step.

        If storage fails, the next save to storage rolls it back.
        """
        try:
            self.begin(save)
        except DirectoryInUse as error:
            text = f"rolled-back steps are not hidden: {error}"
            self._events.emit("persistent.problem", cause="in_use", reason=text[:500])
        except CheckpointError as error:
            text = f"rolled-back steps are not hidden yet: {error}"
            self._events.emit("persistent.problem", cause="unreachable", reason=text[:500])
