"""``replacing.json``: steps that were moved aside for a successor that may not be whole yet.

A step in it counts as before, from where it is kept, as long as nothing that counts lies in its own
place. FORMAT.md is the specification.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from absl import logging

from emergency_ckpt.core.limits import MAX_STEP
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.persistent.marker import HOST_STATE, decode_file
from emergency_ckpt.tiers.storage.directory import StorageDirectory

REPLACING_NAME = "replacing.json"
LIMIT_BYTES = 1 << 20
MAX_NAME_LENGTH = 255
_VERSION = 1
_BELOW = f"{HOST_STATE}/{REPLACING_NAME}"
_NO_STEP = -1
"""The record is of many steps: who changes it waits for every late change of it."""


class ReplacedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the record.

    Attributes:
      incarnation: of the save that is kept; ``unreadable`` when that cannot be told.
      kept_as: the name of its two folders, once they have it.
      is_plain: plain Orbax wrote it: it has tensors only.
      is_kept: all of it is there under that name, or (on a file system) is on its way there by
        renames. False while it is being copied: until then it counts in its own place alone.
    """

    step: int
    incarnation: str
    kept_as: str
    is_plain: bool
    is_kept: bool


class StepPlace(NamedTuple):
    """The two folders of a step: below the directory, and below ``host_state``.

    ``is_aside``: it counts only because the record says so.
    """

    tensors: str
    documents: str
    is_aside: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``digest``: SHA-256 (hex) of the bytes of ``steps`` as they lie in the file."""

    format: int
    digest: str
    steps: msgspec.Raw


def aside_name(step: int, incarnation: str) -> str:
    """The name that a step gets when it is moved aside, if it is free."""
    return f"{step}.rolled-back-{incarnation}"


def encode_replaced(entries: Mapping[int, ReplacedStep]) -> bytes:
    """The file, sorted by step."""
    encoded = msgspec.json.encode([entries[step] for step in sorted(entries)])
    digest = hashlib.sha256(encoded).hexdigest()
    return msgspec.json.encode(_File(_VERSION, digest, msgspec.Raw(encoded)))


def decode_replaced(data: bytes, target: str) -> dict[int, ReplacedStep]:
    """The entries by step. CorruptData, whatever is wrong with the file."""
    if len(data) > LIMIT_BYTES:
        raise CorruptData("decode", target, f"it is larger than {LIMIT_BYTES} bytes")
    file = decode_file(data, _File, target)
    if file.format != _VERSION:
        raise CorruptData(
            "decode", target, "unknown version", expected=_VERSION, actual=file.format
        )
    actual = hashlib.sha256(file.steps).hexdigest()
    if actual != file.digest:
        raise CorruptData(
            "decode", target, "the digest differs", expected=file.digest, actual=actual
        )
    listed = decode_file(bytes(file.steps), tuple[ReplacedStep, ...], target)
    if not all(_is_sound(each) for each in listed):
        raise CorruptData("decode", target, "it names a folder that no step was moved to")
    entries = {each.step: each for each in listed}
    if len(entries) != len(listed):
        raise CorruptData("decode", target, "it names a step twice")
    return entries


def _is_sound(entry: ReplacedStep) -> bool:
    """Whether its name is one that steps are moved to, and leads nowhere else."""
    name = entry.kept_as
    is_name = len(name) <= MAX_NAME_LENGTH and not set(name) & {"/", "\\", "\0"}
    return is_name and 0 <= entry.step <= MAX_STEP and name.startswith(aside_name(entry.step, ""))


class ReplacedSteps:
    """The record of one directory. All methods block for storage, until their deadline."""

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._directory = storage.path

    def read(self, deadline_s: float | None = None) -> dict[int, ReplacedStep]:
        """The entries by step; none without a record.

        PersistentTierError; CorruptData, because a step that counts may be kept under any name.
        """
        data = self._storage.bytes_of(_BELOW, deadline_s)
        if data is None:
            return {}
        target = f"{self._directory}/{_BELOW}"
        try:
            return decode_replaced(data, target)
        except CorruptData as error:
            hint = "to go on without the steps that it names, which lose nothing by it, remove it"
            raise CorruptData("read", target, error.problem, hint=hint) from error

    def place(
        self, entry: ReplacedStep, own: str, deadline_s: float | None = None
    ) -> StepPlace | None:
        """The folders of the step that ``entry`` keeps; None while a copy is not whole.

        ``own``: the name of the folder that it had. On a file system each folder is where it is.
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
        """Put ``entry`` on record, in place of an earlier one of its step. Whole or not at all."""
        self._write({**self.entries(), entry.step: entry})

    def strike(self, step: int) -> None:
        """From now on ``step`` counts in its own place alone. Does nothing without an entry."""
        entries = self.entries()
        if entries.pop(step, None) is not None:
            self._write(entries)

    def entries(self) -> dict[int, ReplacedStep]:
        """As ``read``; but a record that cannot be read is removed, with a warning."""
        try:
            return self.read()
        except CorruptData as error:
            # This job saves: it has restored what it could, or wanted nothing of what is there.
            logging.warning("%s; it is removed, and what it named stays where it is kept", error)
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
