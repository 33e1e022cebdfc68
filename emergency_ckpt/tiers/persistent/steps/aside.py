"""The folders of steps that are moved aside: names, notes, moves and copies."""

from __future__ import annotations

import msgspec

from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.persistent.marker import ASIDE_NAME, HOST_STATE, ITEM, decode_file
from emergency_ckpt.tiers.persistent.orbax_names import COMMITTED
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep
from emergency_ckpt.tiers.persistent.steps.records import StoredSteps
from emergency_ckpt.tiers.persistent.steps.replaced import aside_name
from emergency_ckpt.tiers.storage.directory import StorageDirectory

_VERSION = 1
_UNKNOWN = "unreadable"


class AsideNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``rolled_back.json``: the step no longer counts.

    Attributes:
      incarnation: of the save; ``unreadable`` when it is not known.
      kept_as: the name of the step's two folders after the move.
      reason: for people.
    """

    format: int
    step: int
    incarnation: str
    kept_as: str
    reason: str


class StepsAside:
    """Keeps steps under another name. All methods block for storage. For one writer at a time."""

    def __init__(self, storage: StorageDirectory, found: StoredSteps) -> None:
        self._storage = storage
        self._directory = storage.path
        self._found = found

    def new_note(self, step: int, found: FoundStep | None, reason: str) -> AsideNote:
        """Return a note with an unused name."""
        incarnation = _UNKNOWN
        if found is not None and found.step.incarnation:
            incarnation = found.step.incarnation
        name = self._free_name(aside_name(step, incarnation))
        return AsideNote(_VERSION, step, incarnation, name, reason)

    def write_note(self, note: AsideNote, documents: str) -> None:
        """Write ``note`` into the folder ``documents`` of ``host_state``."""
        path = f"{HOST_STATE}/{documents}/{ASIDE_NAME}"
        self._storage.put(path, msgspec.json.encode(note), step=note.step)

    def note(self, step: int) -> AsideNote | None:
        """Return the note that ``step`` is moved aside, or None."""
        below = f"{HOST_STATE}/{step}/{ASIDE_NAME}"
        data = self._storage.bytes_of(below)
        if data is None:
            return None
        try:
            note = decode_file(data, AsideNote, f"{self._directory}/{below}")
        except CorruptData:
            note = None
        if note is None or note.step != step or "/" in note.kept_as or not note.kept_as:
            # Its presence suffices: the step does not count.
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
        """Rename both folders; in an object store hide the step in its place. Idempotent."""
        step = note.step

        def move() -> None:
            if self._storage.is_object_store:
                self.hide_in_place(str(step))
                return
            # The tensors first: without our folder they would look like a step of plain Orbax.
            for folder in (self._directory, self._directory / HOST_STATE):
                name = self._found.folders.of(step) if folder == self._directory else str(step)
                old, new = folder / name, folder / note.kept_as
                if old.exists() and not new.exists():
                    old.rename(new)

        self._storage.do("move aside", f"/{step}", move, changes=step)

    def copy(self, note: AsideNote, tensors: str) -> None:
        """In an object store, copy the folder ``tensors`` and ours. Idempotent."""

        def copy() -> None:
            self._storage.copy_folder(tensors, note.kept_as)
            self._storage.copy_folder(f"{HOST_STATE}/{note.step}", f"{HOST_STATE}/{note.kept_as}")

        self._storage.do("move aside", f"/{note.step}", copy, changes=note.step)

    def hide_in_place(self, tensors: str) -> None:
        """In an object store, remove the commit markers, without which Orbax ignores the step.

        For use inside ``do``.
        """
        for marker in (COMMITTED, f"{ITEM}/{COMMITTED}"):
            (self._directory / tensors / marker).unlink(missing_ok=True)
