"""The replacement of a step by one of the same number: both exist until the new one is whole."""

from __future__ import annotations

from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.persistent.steps.aside import StepsAside
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep
from emergency_ckpt.tiers.persistent.steps.records import StoredSteps
from emergency_ckpt.tiers.persistent.steps.replaced import ReplacedStep
from emergency_ckpt.tiers.storage.directory import StorageDirectory


class StepReplacement:
    """Moves a step aside for its successor. All methods block. For one writer at a time.

    From ``begin`` to ``end`` the old step counts, unless a step in its own place does. So after a
    crash at any instant, or a failed save, it counts as before.
    """

    def __init__(self, storage: StorageDirectory, found: StoredSteps, aside: StepsAside) -> None:
        self._storage = storage
        self._found = found
        self._record = found.replaced
        self._aside = aside

    def begin(self, found: FoundStep, reason: str) -> str:
        """Keep ``found``, which is in its own place, under another name; return the name.

        On a file system its folders are then moved. In an object store they are copied, and the
        originals may be removed.
        """
        step = found.step.step
        note = self._aside.new_note(step, found, reason)
        is_copied = self._storage.is_object_store
        entry = ReplacedStep(
            step, note.incarnation, note.kept_as, found.is_plain, is_kept=not is_copied
        )
        self._record.put(entry)
        if not is_copied:
            self._aside.write_note(note, str(step))
            self._aside.move(note)
            return note.kept_as
        self._aside.copy(note, found.place.tensors)
        self._aside.write_note(note, note.kept_as)
        self._record.put(
            ReplacedStep(step, note.incarnation, note.kept_as, found.is_plain, is_kept=True)
        )
        self._clear_other_name(found)
        return note.kept_as

    def _clear_other_name(self, found: FoundStep) -> None:
        """Remove the originals of a step that plain Orbax wrote under another name."""
        folder, step = found.place.tensors, found.step.step
        if folder == str(step):
            return

        def clear() -> None:
            self._aside.hide_in_place(folder)
            self._storage.clear_folder(folder)

        self._storage.do("remove", f"/{folder}", clear, changes=step)

    def end(self, step: int) -> None:
        """Make only the step in its own place count as ``step``. Idempotent."""
        self._record.strike(step)

    def settle(self, step: int) -> None:
        """Strike ``step`` if it counts in its own place, after a crash or a failed save.

        Then either its successor is whole, or it was never moved, and a copy of it is removed. No
        process may be saving.
        """
        entry = self._record.entries().get(step)
        if entry is None or self._storage.is_changing(step):
            return
        found = self._found.look_in_place(step)
        if found is None:
            return
        is_same = found.step.incarnation == entry.incarnation
        if self._storage.is_object_store and (is_same or not entry.is_kept):
            self._clear_copy(entry)
        self._record.strike(step)

    def _clear_copy(self, entry: ReplacedStep) -> None:
        def clear() -> None:
            self._storage.clear_folder(entry.kept_as)
            self._storage.clear_folder(f"{HOST_STATE}/{entry.kept_as}")

        self._storage.do("remove", f"/{entry.kept_as}", clear, changes=entry.step)
