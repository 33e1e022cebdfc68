"""Removal of persistent steps, and moves aside."""

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
        """Serialise changes: one thread removes old steps, another leftovers."""
        if not self._changing.acquire(timeout=self._storage.timeout_s):
            target = f"{self._directory}/{step}"
            raise PersistentTierError(operation, target, "another step is still being removed")
        try:
            yield
        finally:
            self._changing.release()

    # Removal.

    def remove(self, step: int) -> None:
        """Remove ``step`` or its remains. After a crash the step is whole or does not count.

        1. Our marker: from then on no restore takes the step.
        2. Orbax's commit: from then on plain Orbax ignores it.
        3. The tensors.
        4. Our folder, which distinguishes it from a step of plain Orbax, so that
           ``remove_leftovers`` finds the rest after a crash.

        A step that was moved aside for this one no longer counts, and stays where it is.
        """
        with self._alone("remove", step):
            self._replacement.end(step)
        self._clear_place(step)

    def _clear_place(self, step: int) -> None:
        """Remove the folders in the step's own place; see ``remove``."""

        def clear() -> None:
            (self._directory / HOST_STATE / str(step) / MARKER_NAME).unlink(missing_ok=True)
            self.remove_arrays(step)
            self._storage.clear_folder(f"{HOST_STATE}/{step}")

        with self._alone("remove", step):
            self._storage.do("remove", f"/{step}", clear, changes=step)

    def remove_arrays(self, step: int) -> None:
        """Make Orbax ignore the step, then remove its folders, also those of unfinished saves."""
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
        """Remove the remains of unfinished saves, and host states without a step.

        Returns the removed steps, and those left because a timed-out call may still change them.
        No process may be saving to the directory. Not changed: steps of plain Orbax, steps with an
        unreadable marker, and steps moved aside for a successor. An unfinished move is completed.
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
                self._clear_place(step)  # its remains: documents, or unnamed folders
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
        """Record ``timeline``, and move aside the steps that it excludes.

        Also moves damaged steps after the one from which the newest life began. Returns (step, name
        under which it is kept) of each. Idempotent.
        """
        self._found.replaced.entries()  # removes a record that cannot be read
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
            logging.warning("%s; it is written again", error)
            there = None
        if newest(there, timeline) == there:
            return
        below = f"{HOST_STATE}/{TIMELINE_NAME}"
        self._storage.put(below, encode_timeline(timeline), step=timeline.start_step)

    def set_aside(self, step: int, reason: str) -> str:
        """Make ``step`` no longer count, for us and for plain Orbax, and keep all its bytes.

        Returns the name under which it is kept. First a note is written, by which our readers
        ignore the step; a step that is aside for a successor is only struck from the record. Then,
        on a file system, its two folders are renamed. An object store cannot rename: Orbax's commit
        markers are deleted, and the bytes stay in place until ``make_room`` needs it.
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
        """Complete a move that was begun. Idempotent."""
        with self._alone("move aside", step):
            note = self._aside.note(step)
            if note is not None:
                self._aside.move(note)

    def make_room(self, step: int, reason: str) -> str | None:
        """Clear the place of ``step`` without the loss of a step that counts.

        A whole or damaged step is moved aside, and counts until ``end_replacement``, or until the
        step written in its place counts. The remains of an unfinished save are removed. Returns the
        name under which a step is now kept, or None.
        """
        in_bucket = self._storage.is_object_store and not self._storage.is_changing(step)
        if in_bucket and not self._found.has_objects(step):
            return None
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
        """Make the step aside no longer count: the one written after ``make_room`` is whole."""
        with self._alone("move aside", step):
            self._replacement.end(step)
