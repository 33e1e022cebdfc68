"""The folders of steps that are moved aside: their names, the note in them, moves and copies."""

from __future__ import annotations

import msgspec

from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.persistent.marker import ASIDE_NAME, HOST_STATE, decode_file
from emergency_ckpt.tiers.persistent.orbax_writer import ITEM
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep
from emergency_ckpt.tiers.persistent.steps.records import StoredSteps
from emergency_ckpt.tiers.persistent.steps.replaced import aside_name
from emergency_ckpt.tiers.storage.directory import StorageDirectory

_COMMIT_MARKER = "commit_success.txt"
"""By these, in object stores, Orbax knows a finished step and a finished item."""

_VERSION = 1
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


class StepsAside:
    """Keeps steps under another name. All methods block for storage; nobody else changes them."""

    def __init__(self, storage: StorageDirectory, found: StoredSteps) -> None:
        self._storage = storage
        self._directory = storage.path
        self._found = found

    def new_note(self, step: int, found: FoundStep | None, reason: str) -> AsideNote:
        """A note with a name that is free."""
        incarnation = _UNKNOWN
        if found is not None and found.step.incarnation:
            incarnation = found.step.incarnation
        name = self._free_name(aside_name(step, incarnation))
        return AsideNote(_VERSION, step, incarnation, name, reason)

    def write_note(self, note: AsideNote, documents: str) -> None:
        """Put ``note`` into a folder below ``host_state``."""
        path = f"{HOST_STATE}/{documents}/{ASIDE_NAME}"
        self._storage.put(path, msgspec.json.encode(note), step=note.step)

    def note(self, step: int) -> AsideNote | None:
        """The note that ``step`` is moved aside; None when it is not."""
        below = f"{HOST_STATE}/{step}/{ASIDE_NAME}"
        data = self._storage.bytes_of(below)
        if data is None:
            return None
        try:
            note = decode_file(data, AsideNote, f"{self._directory}/{below}")
        except CorruptData:
            note = None
        if note is None or note.step != step or "/" in note.kept_as or not note.kept_as:
            # That it is there says enough: the step does not count.
            return self.new_note(step, None, "the note cannot be read")
        return note

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

    def move(self, note: AsideNote) -> None:
        """Rename both folders; in an object store hide the step in its place. Safe to repeat."""
        step = note.step

        def move() -> None:
            if self._storage.is_object_store:
                self.hide_in_place(str(step))
                return
            # The tensors first: without our folder beside them they would be of plain Orbax.
            for folder in (self._directory, self._directory / HOST_STATE):
                name = self._found.folders.of(step) if folder == self._directory else str(step)
                old, new = folder / name, folder / note.kept_as
                if old.exists() and not new.exists():
                    old.rename(new)

        self._storage.do("move aside", f"/{step}", move, changes=step)

    def copy(self, note: AsideNote, tensors: str) -> None:
        """In an object store: copy the folder ``tensors`` and ours beside it. Safe to repeat."""

        def copy() -> None:
            self._storage.copy_folder(tensors, note.kept_as)
            self._storage.copy_folder(f"{HOST_STATE}/{note.step}", f"{HOST_STATE}/{note.kept_as}")

        self._storage.do("move aside", f"/{note.step}", copy, changes=note.step)

    def hide_in_place(self, tensors: str) -> None:
        """In an object store: Orbax overlooks what has no commit marker. For use inside ``do``."""
        for marker in (_COMMIT_MARKER, f"{ITEM}/{_COMMIT_MARKER}"):
            (self._directory / tensors / marker).unlink(missing_ok=True)
