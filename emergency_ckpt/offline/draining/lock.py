"""The notes in a persistent directory that a drain is under way, so that there is one at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import msgspec

from emergency_ckpt.core.limits import MAX_DRAIN_LOCK_BYTES
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.ramdisk.owners import Owner, this_process
from emergency_ckpt.tiers.storage.directory import StorageDirectory

BELOW = f"{HOST_STATE}/draining.json"
"""The first note; the next ones have a number in their names."""
STALE_S = 7200.0
"""Age in seconds at which the drain of another host counts as dead; drains have deadlines."""

_NAME = re.compile(r"draining(?:\.([1-9][0-9]{0,5}))?\.json", re.ASCII)
_CLOCK_S = 60.0
_ATTEMPTS = 3


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begun_s: float
    owner: Owner


class DrainLock:
    """Has a note while inside. PersistentTierError when another drain is under way.

    A note is never replaced: of two drains that find the note of a dead one, the second would take
    that of the first for it. Each drain makes the next note, which only one of them can make, and
    at its end removes it and those before. The note of a drain that was killed counts for nothing:
    at once where its host is this one, else when it is older than two hours. Jobs and restores do
    not look at notes.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._data = msgspec.json.encode(_Note(time.time(), this_process("drain")))
        self._number = -1

    def __enter__(self) -> DrainLock:
        for _ in range(_ATTEMPTS):
            there = notes_in(self._storage)
            self._refuse(there.values())
            number = max(there, default=-1) + 1
            if not self._make(number):
                continue
            self._number = number
            others = notes_in(self._storage)
            others.pop(number, None)
            try:
                # One may have come and gone, and one come, since the look before.
                self._refuse(others.values())
            except PersistentTierError:
                self._remove([number])
                raise
            return self
        target = str(self._storage.path)
        raise PersistentTierError("drain into", target, "other drains begin at the same time")

    def __exit__(self, *_: object) -> None:
        numbers = [number for number in notes_in(self._storage) if number <= self._number]
        self._remove(sorted(numbers))  # its own last: until then no other drain begins

    def _make(self, number: int) -> bool:
        below, writer = _below(number), f"drain-{this_process('drain').pid}"
        is_new = self._storage.put_first(below, self._data, writer)
        return is_new or self._storage.bytes_of(below) == self._data

    def _refuse(self, notes: Iterable[bytes]) -> None:
        for data in notes:
            if not _is_dead(data):
                raise PersistentTierError(
                    "drain into",
                    str(self._storage.path),
                    f"another drain is under way there: {_describe(data)}",
                    hint=f"wait for it; if it died on another host, remove {HOST_STATE}/draining*",
                )

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            path = self._storage.path / _below(number)
            self._storage.do(
                "remove", f"/{_below(number)}", lambda path=path: path.unlink(missing_ok=True)
            )


def notes_in(storage: StorageDirectory) -> dict[int, bytes]:
    """Return the notes of drains, under way or dead, by their numbers. Blocks for storage."""
    notes: dict[int, bytes] = {}
    for found in map(_NAME.fullmatch, storage.names_in(HOST_STATE)):
        number = None if found is None else int(found[1] or 0)
        data = None if number is None else storage.bytes_of(_below(number))
        if number is not None and data is not None:
            notes[number] = data
    return notes


def _below(number: int) -> str:
    return BELOW if number == 0 else f"{HOST_STATE}/draining.{number}.json"


def _note_of(data: bytes) -> _Note | None:
    try:
        return msgspec.json.decode(data[:MAX_DRAIN_LOCK_BYTES], type=_Note)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _is_dead(data: bytes) -> bool:
    note = _note_of(data)
    if note is None or note.owner.is_running is False:
        return True
    age_s = time.time() - note.begun_s
    return note.owner.is_running is None and not -_CLOCK_S < age_s < STALE_S


def _describe(data: bytes) -> str:
    note = _note_of(data)
    return f"process {note.owner.pid} on host {note.owner.hostname}" if note else "damaged"
