"""``replacing.json``: steps that were moved aside for a successor that may not be whole yet.

A step in it counts as before, in the folders where it is kept, while no step in its own place
counts. FORMAT.md is the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from absl import logging

from emergency_ckpt.core.limits import MAX_LABEL_CHARS, MAX_REPLACED_BYTES, MAX_STEP
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.digested_file import DigestedFile
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.storage.directory import StorageDirectory

REPLACING_NAME = "replacing.json"
_BELOW = f"{HOST_STATE}/{REPLACING_NAME}"
_NO_STEP = -1
"""The record has many steps, so a change of it waits for every timed-out change of it."""


class ReplacedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the record.

    Attributes:
      incarnation: of the save that is kept; ``unreadable`` when it is not known.
      kept_as: the name of its two folders after the move.
      is_plain: plain Orbax wrote it, so it has tensors only.
      is_kept: it is complete under that name, or (on a file system) its renames have begun. False
        during a copy, when it counts in its own place only.
    """

    step: int
    incarnation: str
    kept_as: str
    is_plain: bool
    is_kept: bool


class StepPlace(NamedTuple):
    """The two folders of a step: below the directory, and below ``host_state``.

    ``is_aside``: the step counts only because of its entry in the record.
    """

    tensors: str
    documents: str
    is_aside: bool = False


_FILE = DigestedFile("steps", tuple[ReplacedStep, ...], version=1, limit_bytes=MAX_REPLACED_BYTES)


def aside_name(step: int, incarnation: str) -> str:
    """Return the name for a step that is moved aside, if it is unused."""
    return f"{step}.rolled-back-{incarnation}"


def encode_replaced(entries: Mapping[int, ReplacedStep]) -> bytes:
    """Return the bytes of the file, sorted by step."""
    return _FILE.encode([entries[step] for step in sorted(entries)])


def decode_replaced(data: bytes, target: str) -> dict[int, ReplacedStep]:
    """Return the entries by step. CorruptData is the only error."""
    listed = _FILE.decode(data, target)
    if not all(_is_sound(each) for each in listed):
        raise CorruptData("decode", target, "it names a folder that no step was moved to")
    entries = {each.step: each for each in listed}
    if len(entries) != len(listed):
        raise CorruptData("decode", target, "it names a step twice")
    return entries


def _is_sound(entry: ReplacedStep) -> bool:
    """Return True when the name is one for steps moved aside, and is no path elsewhere."""
    name = entry.kept_as
    is_name = len(name) <= MAX_LABEL_CHARS and not set(name) & {"/", "\\", "\0"}
    return is_name and 0 <= entry.step <= MAX_STEP and name.startswith(aside_name(entry.step, ""))


class ReplacedSteps:
    """The record of one directory. All methods block for storage, until their deadline."""

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._directory = storage.path

    def read(self, deadline_s: float | None = None) -> dict[int, ReplacedStep]:
        """Return the entries by step; none without a record.

        PersistentTierError. CorruptData when it cannot be decoded, because a step that counts may
        be named in it.
        """
        data = self._storage.bytes_of(_BELOW, deadline_s)
        if data is None:
            return {}
        target = f"{self._directory}/{_BELOW}"
        try:
            return decode_replaced(data, target)
        except CorruptData as error:
            hint = "remove it to continue without the steps that it names; their bytes are kept"
            raise CorruptData("read", target, error.problem, hint=hint) from error

    def place(
        self, entry: ReplacedStep, own: str, deadline_s: float | None = None
    ) -> StepPlace | None:
        """Return the folders of the step in ``entry``, or None while its copy is not whole.

        ``own``: the folder's name before the move. On a file system each folder may have either.
        """
        if self._storage.is_object_store:
            return StepPlace(entry.kept_as, entry.kept_as, True) if entry.is_kept else None

        def look() -> StepPlace:
            tensors = (self._directory / entry.kept_as).exists()
            documents = (self._directory / HOST_STATE / entry.kept_as).exists()
            return StepPlace(
                entry.kept_as if tensors else own,
                entry.kept_as if documents else str(entry.step),
                True,
            )

        return self._storage.do("look at", f"/{entry.kept_as}", look, deadline_s)

    # Changes: by the process that writes to the directory, one at a time.

    def put(self, entry: ReplacedStep) -> None:
        """Record ``entry`` in place of an earlier one of its step, atomically."""
        self._write({**self.entries(), entry.step: entry})

    def strike(self, step: int) -> None:
        """Remove the entry of ``step``, so that it counts in its own place only. Idempotent."""
        entries = self.entries()
        if entries.pop(step, None) is not None:
            self._write(entries)

    def entries(self) -> dict[int, ReplacedStep]:
        """Return the entries by step; a record that cannot be decoded is removed with a warning."""
        try:
            return self.read()
        except CorruptData as error:
            # A job that saves has already restored, or did not want to.
            logging.warning("%s; it is removed, and the folders that it named are kept", error)
            self._write({})
            return {}

    def _write(self, entries: Mapping[int, ReplacedStep]) -> None:
        if entries:
            self._storage.put(_BELOW, encode_replaced(entries), step=_NO_STEP)
            return
        path = self._directory / _BELOW
        self._storage.do(
            "remove", f"/{_BELOW}", lambda: path.unlink(missing_ok=True), changes=_NO_STEP
        )
