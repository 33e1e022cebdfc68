"""A probe of the persistent directory: a small file is written, read back and removed."""

from __future__ import annotations

import re

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage.directory import StorageDirectory, written_for
from emergency_ckpt.storage.marker import HOST_STATE

_NAME = re.compile(r"probe-([0-9]{12})-[0-9a-f]{16}")


def probe_storage(
    storage: StorageDirectory, incarnation: str, deadline_s: float, *, conditions: bool = False
) -> None:
    """Raise PersistentTierError when saves cannot use the directory. Blocks until the deadline.

    The file is created only if absent, like TensorStore's files in a bucket, at a place that
    neither Orbax nor a listing of steps reads. Files of crashed starts are removed.

    Args:
      incarnation: of this life; part of the file's name, so that no other start uses it.
      deadline_s: of ``time.monotonic``.
      conditions: also check that the file is not created a second time.
    """
    storage.create(deadline_s)
    name = f"probe-{incarnation}"
    # First, so that a start leaves no further file where deletions are refused.
    for other in storage.names_in(HOST_STATE, deadline_s):
        if is_left_over(other, name):
            _remove(storage, other, deadline_s)
    try:
        _write_and_read(storage, f"{HOST_STATE}/{name}", incarnation.encode(), deadline_s)
        if conditions:
            _check_conditions(storage, f"{HOST_STATE}/{name}", deadline_s)
    except PersistentTierError as error:
        try:
            _remove(storage, name, deadline_s)
        except PersistentTierError as second:
            error.add_note(f"The file may still be there: {second}")
        raise
    _remove(storage, name, deadline_s)


def is_left_over(name: str, own: str) -> bool:
    """Return True when ``name`` is a file of an earlier start, by the numbers in both names.

    A start that was killed also leaves the temporary file of its file.
    """
    other, mine = _NAME.fullmatch(written_for(name) or name), _NAME.fullmatch(own)
    return other is not None and mine is not None and other[1] < mine[1]


def _write_and_read(storage: StorageDirectory, below: str, data: bytes, deadline_s: float) -> None:
    storage.do("write", f"/{below}", lambda: storage.put_new(below, data), deadline_s)
    read_back = storage.bytes_of(below, deadline_s)
    if read_back != data:
        target, problem = f"{storage.path}/{below}", "the bytes differ from those just written"
        actual = read_back and read_back[: 2 * len(data)]
        raise PersistentTierError("read", target, problem, expected=data, actual=actual)


def _check_conditions(storage: StorageDirectory, below: str, deadline_s: float) -> None:
    if storage.put_first(below, b"another writer", deadline_s):
        problem = "it was created although it existed: two runs could not be kept apart"
        hint = "use storage that honours preconditions, or a file system with hard links"
        raise PersistentTierError("write", f"{storage.path}/{below}", problem, hint=hint)


def _remove(storage: StorageDirectory, name: str, deadline_s: float) -> None:
    below = f"{HOST_STATE}/{name}"
    path = storage.path / below
    storage.do("remove", f"/{below}", lambda: path.unlink(missing_ok=True), deadline_s)
