"""Changes that take a persistent step out of the directory: removal, or a move aside."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from absl import logging

from emergency_ckpt.core.timeline import Timeline, newest
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE, MARKER_NAME
from emergency_ckpt.tiers.persistent.steps.aside import StepsAside
from emergency_ckpt.tiers.persistent.steps.records import StoredSteps
from emergency_ckpt.tiers.persistent.steps.replacement import StepReplacement
from emergency_ckpt.tiers.storage.directory import StorageDirectory
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, encode_timeline

_HIDDEN = ".orbax-checkpoint-tmp-removed"


class StepChanges:
    """Removes steps and moves them aside, one at a time. All methods block for storage."""

    def __init__(self, storage: StorageDirectory, found: StoredSteps) -> None:
        self._storage = storage
        self._directory = storage.path
        self._found = found
        self._aside = StepsAside(storage, found)
        self._replacement = StepReplacement(storage, found, self._aside)
        self._changing = threading.Lock()

    @contextlib.contextmanager
    def _alone(self, operation: str, step: int) -> Generator[None]:
        """Old steps are removed in one thread, and leftovers in another."""
        if not self._changing.acquire(timeout=self._storage.timeout_s):
            target = f"{self._directory}/{step}"
            raise PersistentTierError(operation, target, "another step is still being removed")
        try:
            yield
        finally:
            self._changing.release()

    # Removal.

    def remove(self, step: int) -> None:
        """Remove ``step``, or what is left of it. After a crash it is whole, or counts nowhere.

        Our marker goes first: from then on no restore takes it. Then plain Orbax is made to
        overlook it, before anything else in it goes. What tells it from a step of plain Orbax goes
        last, so that ``remove_leftovers`` finds the rest. A step that was moved aside for it does
        not count any more, and stays where it is.
        """
        with self._alone("remove", step):
            self._replacement.end(step)
        self._clear_place(step)

    def _clear_place(self, step: int) -> None:
        """Remove what lies in the own place of ``step``: see ``remove``."""

        def clear() -> None:
            (self._directory / HOST_STATE / str(step) / MARKER_NAME).unlink(missing_ok=True)
            self.remove_arrays(step)
            self._storage.clear_folder(f"{HOST_STATE}/{step}")

        with self._alone("remove", step):
            self._storage.do("remove", f"/{step}", clear, changes=step)

    def remove_arrays(self, step: int) -> None:
        """Make Orbax overlook the step, then remove its folders, also those of unfinished saves."""
        if self._storage.is_object_store:
            self._aside.hide_in_place(str(step))
            self._storage.clear_folder(str(step))
            return
        for path in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            self._storage.clear_folder(path.name)
        whole = self._directory / str(step)
        if whole.exists():
            hidden = f"{step}{_HIDDEN}"
            whole.rename(self._directory / hidden)
            self._storage.clear_folder(hidden)

    def remove_leftovers(self) -> tuple[list[int], list[int]]:
        """Remove what saves that did not end have left, and documents of steps that are gone.

        Returns their steps, and those left alone because a call that was given up is still there.
        Nobody may be saving to the directory. Steps of plain Orbax are never touched, nor is a step
        whose marker cannot be read. What was being moved aside is moved; of a step that was moved
        aside for a successor nothing goes.
        """
        for step in self._found.replaced.entries():
            with self._alone("move aside", step):
                self._replacement.settle(step)
        removed: list[int] = []
        left: list[int] = []
        beside = self._storage.numbers_in(HOST_STATE)
        listed = self._storage.numbers_in()
        for step in sorted(beside):
            if self._storage.is_changing(step):
                left.append(step)
            elif self._aside.note(step) is not None:
                self._move(step)
            elif step not in listed:
                self._clear_place(step)  # what is left of it: documents, or folders without a name
                removed.append(step)
            elif self._is_unfinished(step):
                self._clear_place(step)
                removed.append(step)
            elif self._found.is_replaced(step):
                self._remove_documents(step)
                removed.append(step)
        return removed, left

    def _is_unfinished(self, step: int) -> bool:
        path = self._directory / HOST_STATE / str(step) / MARKER_NAME
        if self._storage.do("look at", f"/{step}", path.exists):
            return False
        return self._found.look(step, is_ours=True) is None

    def _remove_documents(self, step: int) -> None:
        def clear() -> None:
            (self._directory / HOST_STATE / str(step) / MARKER_NAME).unlink(missing_ok=True)
            self._storage.clear_folder(f"{HOST_STATE}/{step}")

        with self._alone("remove documents of", step):
            self._storage.do("remove", f"/{HOST_STATE}/{step}", clear, changes=step)

    # Moving aside.

    def follow(self, timeline: Timeline) -> list[tuple[int, str]]:
        """Put ``timeline`` on record, and move aside what it does not have.

        Also a step that has a problem and lies behind the one from which the newest life began.
        Returns (step, name under which it is kept). Safe to repeat; does nothing when all is done.
        """
        self._found.replaced.entries()  # one that cannot be read must not be in the way
        self._put_timeline(timeline)
        moved: list[tuple[int, str]] = []
        deadline_s = self._storage.deadline_s(None)
        for found in self._found.all_there(deadline_s):
            step = found.step
            reason = timeline.objection(step.step, step.incarnation)
            if not reason and step.problem and step.step > timeline.start_step:
                reason = step.problem
            if reason:
                moved.append((step.step, self.set_aside(step.step, reason)))
        return moved

    def _put_timeline(self, timeline: Timeline) -> None:
        try:
            there = self._found.timeline()
        except CorruptData as error:
            logging.warning("%s; it is written anew", error)
            there = None
        if newest(there, timeline) == there:
            return
        below = f"{HOST_STATE}/{TIMELINE_NAME}"
        self._storage.put(below, encode_timeline(timeline), step=timeline.start_step)

    def set_aside(self, step: int, reason: str) -> str:
        """Have ``step`` count no more, for us and for plain Orbax, and keep every byte of it.

        Returns the name under which it is kept. A note goes first, by which our readers overlook
        the step from then on; one that was aside for a successor only has to be struck from the
        record. On a file system its two folders then get another name. In an object
        store nothing can be renamed: Orbax's commit markers go, and the bytes stay in their place
        until ``make_room`` needs it.
        """
        is_aside = self._found.place_of(step).is_aside
        with self._alone("move aside", step):
            entry = self._found.replaced.entries().get(step)
            self._replacement.end(step)
            if is_aside and entry is not None:
                return entry.kept_as
            note = self._aside.new_note(step, self._found.look_in_place(step), reason)
            self._aside.write_note(note, str(step))
            self._aside.move(note)
        logging.warning(
            "step %d in %s is kept as %s: %s", step, self._directory, note.kept_as, reason
        )
        return note.kept_as

    def _move(self, step: int) -> None:
        """Go on with what was begun. Safe to repeat."""
        with self._alone("move aside", step):
            note = self._aside.note(step)
            if note is not None:
                self._aside.move(note)

    def make_room(self, step: int, reason: str) -> str | None:
        """See that nothing lies where ``step`` is to be written, and lose nothing that counts.

        A step that is whole, or that has a problem, is moved aside, and counts until
        ``end_replacement``, or until what is written in its place counts; what a save that did not
        end has left is removed. Returns the name under which a step is kept now, if one is.
        """
        kept: str | None = None
        with self._alone("move aside", step):
            found = self._found.look_in_place(step)
            note = self._aside.note(step)
            if found is not None:
                kept = self._replacement.begin(found, reason)
            elif note is not None and self._storage.is_object_store:
                self._aside.copy(note, str(step))
                kept = note.kept_as
            elif note is not None:
                self._aside.move(note)
        if found is not None:
            logging.warning("step %d in %s is kept as %s: %s", step, self._directory, kept, reason)
        self._clear_place(step)
        return kept

    def end_replacement(self, step: int) -> None:
        """A step was written where ``make_room`` made room, and is whole: the other one is past."""
        with self._alone("move aside", step):
            self._replacement.end(step)
