"""Changes that take a persistent step out of the directory: removal, or a move aside."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import msgspec
from absl import logging

from emergency_ckpt.core.timeline import Timeline, newest
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.orbax_writing import ITEM
from emergency_ckpt.tiers.persistent_marker import (
    ASIDE_NAME,
    HOST_STATE,
    MARKER_NAME,
    decode_file,
)
from emergency_ckpt.tiers.storage_directory import StorageDirectory
from emergency_ckpt.tiers.stored_steps import FoundStep, StoredSteps
from emergency_ckpt.tiers.timeline_record import TIMELINE_NAME, encode_timeline

_HIDDEN = ".orbax-checkpoint-tmp-removed"
_COMMIT_MARKER = "commit_success.txt"
"""By these, in object stores, Orbax knows a finished step and a finished item."""

_ASIDE_VERSION = 1
_UNKNOWN = "unreadable"


class AsideNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``rolled_back.json``: the step beside it does not count any more.

    Attributes:
      incarnation: of the save; ``unreadable`` when that cannot be told.
      kept_as: the name of its two folders, once they have been moved.
      reason: why, for people.
    """

    format: int
    step: int
    incarnation: str
    kept_as: str
    reason: str


class StepChanges:
    """Removes steps and moves them aside, one at a time. All methods block for storage."""

    def __init__(self, storage: StorageDirectory, found: StoredSteps) -> None:
        self._storage = storage
        self._directory = storage.path
        self._found = found
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
        last, so that ``remove_leftovers`` finds the rest.
        """

        def clear() -> None:
            (self._directory / HOST_STATE / str(step) / MARKER_NAME).unlink(missing_ok=True)
            self.remove_arrays(step)
            self._storage.clear_folder(f"{HOST_STATE}/{step}")

        with self._alone("remove", step):
            self._storage.do("remove", f"/{step}", clear, changes=step)

    def remove_arrays(self, step: int) -> None:
        """Make Orbax overlook the step, then remove its folders, also those of unfinished saves."""
        if self._storage.is_object_store:
            self._hide_in_place(step)
            self._storage.clear_folder(str(step))
            return
        for path in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            self._storage.clear_folder(path.name)
        whole = self._directory / str(step)
        if whole.exists():
            hidden = f"{step}{_HIDDEN}"
            whole.rename(self._directory / hidden)
            self._storage.clear_folder(hidden)

    def _hide_in_place(self, step: int) -> None:
        """In an object store: Orbax overlooks what has no commit marker."""
        for marker in (_COMMIT_MARKER, f"{ITEM}/{_COMMIT_MARKER}"):
            (self._directory / str(step) / marker).unlink(missing_ok=True)

    def remove_leftovers(self) -> tuple[list[int], list[int]]:
        """Remove what saves that did not end have left, and documents of steps that are gone.

        Returns their steps, and those left alone because a call that was given up is still there.
        Nobody may be saving to the directory. Steps of plain Orbax are never touched, nor is a step
        whose marker cannot be read. What was being moved aside is moved.
        """
        removed: list[int] = []
        left: list[int] = []
        beside = self._storage.numbers_in(HOST_STATE)
        listed = self._storage.numbers_in()
        for step in sorted(beside):
            if self._storage.is_changing(step):
                left.append(step)
            elif self._note(step) is not None:
                self._move(step)
            elif step not in listed:
                self.remove(step)  # what is left of it: documents, or folders without a name
                removed.append(step)
            elif self._is_unfinished(step):
                self.remove(step)
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
        self._put_timeline(timeline)
        moved: list[tuple[int, str]] = []
        deadline_s = self._storage.deadline_s(None)
        for step in self._found.all_there(deadline_s):
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
        the step from then on. On a file system its two folders then get another name. In an object
        store nothing can be renamed: Orbax's commit markers go, and the bytes stay in their place
        until ``make_room`` needs it.
        """
        is_ours = self._found.listed(self._storage.deadline_s(None)).get(step, False)
        found = self._found.look(step, is_ours=is_ours)
        incarnation = _incarnation_of(found)
        name = self._free_name(f"{step}.rolled-back-{incarnation}")
        note = AsideNote(_ASIDE_VERSION, step, incarnation, name, reason)
        path = f"{HOST_STATE}/{step}/{ASIDE_NAME}"
        self._storage.put(path, msgspec.json.encode(note), step=step)
        self._move(step)
        logging.warning("step %d in %s is kept as %s: %s", step, self._directory, name, reason)
        return name

    def _free_name(self, wanted: str) -> str:
        def free() -> str:
            name, number = wanted, 1
            while (self._directory / name).exists() or (
                self._directory / HOST_STATE / name
            ).exists():
                number += 1
                name = f"{wanted}.{number}"
            return name

        return self._storage.do("look at", f"/{wanted}", free)

    def _note(self, step: int) -> AsideNote | None:
        """The note that ``step`` was moved aside; CorruptData when it cannot be read."""
        below = f"{HOST_STATE}/{step}/{ASIDE_NAME}"
        path = self._directory / below

        def read() -> bytes | None:
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

        data = self._storage.do("read", f"/{below}", read)
        if data is None:
            return None
        try:
            note = decode_file(data, AsideNote, str(path))
        except CorruptData:
            note = None
        if note is None or note.step != step or "/" in note.kept_as or not note.kept_as:
            # That it is there says enough: the step does not count.
            name = self._free_name(f"{step}.rolled-back-{_UNKNOWN}")
            return AsideNote(_ASIDE_VERSION, step, _UNKNOWN, name, "the note cannot be read")
        return note

    def _move(self, step: int) -> None:
        """Go on with what ``set_aside`` began. Safe to repeat."""
        note = self._note(step)
        assert note is not None, "it is written first"

        def move() -> None:
            if self._storage.is_object_store:
                self._hide_in_place(step)
                return
            # The tensors first: without our folder beside them they would be of plain Orbax.
            for folder in (self._directory, self._directory / HOST_STATE):
                name = self._found.folders.of(step) if folder == self._directory else str(step)
                old, new = folder / name, folder / note.kept_as
                if old.exists() and not new.exists():
                    old.rename(new)

        with self._alone("move aside", step):
            self._storage.do("move aside", f"/{step}", move, changes=step)

    def make_room(self, step: int, reason: str) -> str | None:
        """See that nothing lies where ``step`` is to be written, and lose nothing that counts.

        A step that is whole, or that has a problem, is moved aside; what a save that did not end
        has left is removed. Returns the name under which a step is kept now, if one is.
        """
        kept: str | None = None
        listed = self._found.listed(self._storage.deadline_s(None))
        if step in listed and self._found.look(step, is_ours=listed[step]) is not None:
            kept = self.set_aside(step, reason)
        note = self._note(step) if step in self._storage.numbers_in(HOST_STATE) else None
        if note is not None and self._storage.is_object_store:
            self._copy_aside(step, note)
            kept = note.kept_as
        self.remove(step)
        return kept

    def _copy_aside(self, step: int, note: AsideNote) -> None:
        """In an object store: copy what lies there hidden, before it is removed."""

        def copy() -> None:
            self._storage.copy_folder(str(step), note.kept_as)
            self._storage.copy_folder(f"{HOST_STATE}/{step}", f"{HOST_STATE}/{note.kept_as}")

        with self._alone("move aside", step):
            self._storage.do("move aside", f"/{step}", copy, changes=step)


def _incarnation_of(found: FoundStep | None) -> str:
    if found is None or not found.step.incarnation:
        return _UNKNOWN
    return found.step.incarnation
