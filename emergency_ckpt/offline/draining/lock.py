"""The note in a persistent directory that a drain is under way, so that there is one at a time."""

from __future__ import annotations

import time

import msgspec

from emergency_ckpt.core.limits import MAX_DRAIN_LOCK_BYTES
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.ramdisk.owners import Owner, this_process
from emergency_ckpt.tiers.storage.directory import StorageDirectory

BELOW = f"{HOST_STATE}/draining.json"
STALE_S = 7200.0
"""Age in seconds at which the drain of another host counts as dead; drains have deadlines."""

_CLOCK_S = 60.0


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begun_s: float
    owner: Owner


class DrainLock:
    """Holds the note while inside. PersistentTierError when another drain is under way.

    The note of a drain that was killed is removed: at once where its host is this one, else when it
    is older than two hours. Jobs and restores do not look at it.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._data = msgspec.json.encode(_Note(time.time(), this_process("drain")))

    def __enter__(self) -> DrainLock:
        writer = f"drain-{this_process('drain').pid}"
        for _ in range(3):
            if self._storage.put_first(BELOW, self._data, writer):
                return self
            there = self._storage.bytes_of(BELOW)
            if there == self._data:
                return self
            if there is not None and not _is_dead(there):
                raise PersistentTierError(
                    "drain into",
                    str(self._storage.path),
                    f"another drain is under way there: {_describe(there)}",
                    hint=f"wait for it; if it died on another host, remove {BELOW}",
                )
            self._remove()
        target = str(self._storage.path)
        raise PersistentTierError("drain into", target, "other drains begin at the same time")

    def __exit__(self, *_: object) -> None:
        if self._storage.bytes_of(BELOW) == self._data:
            self._remove()

    def _remove(self) -> None:
        path = self._storage.path / BELOW
        self._storage.do("remove", f"/{BELOW}", lambda: path.unlink(missing_ok=True))


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
