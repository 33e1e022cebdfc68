"""A probe of the persistent directory: a small file is written, read back and removed."""

from __future__ import annotations

import re

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.storage.directory import StorageDirectory

_NAME = re.compile(r"probe-([0-9a-f]{12})-[0-9a-f]{16}")
_LEFT_AFTER_MS = 600_000
"""A probe takes seconds; the rest allows for clocks that differ."""


def probe_storage(storage: StorageDirectory, incarnation: str, deadline_s: float) -> None:
    """Raise PersistentTierError when saves cannot use the directory. Blocks until the deadline.

    The file is created only if absent, like TensorStore's files in a bucket, at a place that
    neither Orbax nor a listing of steps reads. Files of crashed starts are removed.

    Args:
      incarnation: of this life; part of the file's name, so that no other start uses it.
      deadline_s: of ``time.monotonic``.
    """
    storage.create(deadline_s)
    name = f"probe-{incarnation}"
    try:
        _write_and_read(storage, f"{HOST_STATE}/{name}", incarnation.encode(), deadline_s)
    except PersistentTierError as error:
        try:
            _remove(storage, name, deadline_s)
        except PersistentTierError as second:
            error.add_note(f"The file may still be there: {second}")
        raise
    _remove(storage, name, deadline_s)
    for other in storage.names_in(HOST_STATE, deadline_s):
        if is_left_over(other, name):
            _remove(storage, other, deadline_s)


def is_left_over(name: str, own: str) -> bool:
    """Return True when ``name`` is a file of an earlier start, by the clocks in both names."""
    found, mine = _NAME.fullmatch(name), _NAME.fullmatch(own)
    if found is None or mine is None:
        return False
    return int(mine[1], 16) - int(found[1], 16) > _LEFT_AFTER_MS


def _write_and_read(storage: StorageDirectory, below: str, data: bytes, deadline_s: float) -> None:
    storage.do("write", f"/{below}", lambda: storage.put_new(below, data), deadline_s)
    found = storage.do("read", f"/{below}", (storage.path / below).read_bytes, deadline_s)
    if found != data:
        raise PersistentTierError(
            "read",
            f"{storage.path}/{below}",
            "the bytes differ from those just written",
            expected=data,
            actual=found[: 2 * len(data)],
        )


def _remove(storage: StorageDirectory, name: str, deadline_s: float) -> None:
    below = f"{HOST_STATE}/{name}"
    path = storage.path / below
    storage.do("remove", f"/{below}", lambda: path.unlink(missing_ok=True), deadline_s)
