"""``host_state/log/<number>.json``: the versions of the step log. FORMAT.md is the specification."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from emergency_ckpt.core.limits import MAX_LOG_BYTES, MAX_VERSION
from emergency_ckpt.core.secret.step_signature import StepSigning
from emergency_ckpt.core.step_log import Table, problem_of
from emergency_ckpt.errors import CorruptData, NewerFormat, PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.persistent.signed_file import SignedFile
from emergency_ckpt.tiers.storage.directory import StorageDirectory, read_at_most

LOG_FOLDER = f"{HOST_STATE}/log"
KEPT = 8
"""So many of the newest versions stay."""

_FILE = SignedFile("table", Table, limit_bytes=MAX_LOG_BYTES)
_NAME = re.compile(r"([0-9]{12})\.json", re.ASCII)
_HINT = f"{LOG_FOLDER}/newest"
"""On a file system, a number that the newest version has reached. Nothing depends on it but where
the newest version is looked for, as by a listing."""
_NUMBER = re.compile(rb"[0-9]{1,12}")
_PAUSE_S = 0.5


def encode_table(table: Table, signing: StepSigning) -> bytes:
    """Return the bytes of a version. CorruptData when it is too large."""
    return _FILE.encode(table, signing)


def decode_table(data: bytes, number: int, target: str, signing: StepSigning) -> tuple[Table, str]:
    """Return the table of version ``number``, and why its writer is unknown, or "". CorruptData."""
    table, doubt = _FILE.decode(data, target, signing)
    problem = problem_of(table) or signing.objection(doubt)
    if not problem and table.number != number:
        problem = f"it is version {table.number}"
    if problem:
        raise CorruptData("decode", target, problem)
    return table, doubt


class LogRead(NamedTuple):
    """The log as read.

    Attributes:
      number: of the newest version; 0 without any.
      table: of the newest version that can be used, or None.
      faults: of newer versions, which cannot.
      doubt: why the writer of ``table`` is unknown although steps are signed, or "".
      listed: the numbers that were listed.
    """

    number: int = 0
    table: Table | None = None
    faults: tuple[CorruptData, ...] = ()
    doubt: str = ""
    listed: tuple[int, ...] = ()


class StepLog:
    """The log of one directory. All methods block for storage; PersistentTierError.

    The ``KEPT`` newest versions have no gaps, so the absence of the next one shows that a version is
    the newest.
    """

    def __init__(self, storage: StorageDirectory, signing: StepSigning) -> None:
        self._storage = storage
        self._signing = signing

    @property
    def target(self) -> str:
        """Return the path of the folder with the versions."""
        return f"{self._storage.path}/{LOG_FOLDER}"

    def read(self, deadline_s: float | None = None) -> LogRead:
        """Return the newest version that can be used; a damaged one is named, and passed over.

        NewerFormat when a later version of this package wrote the newest.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        while True:
            numbers = self._numbers(deadline_s)
            if not numbers:
                return LogRead()
            found = self._decode(numbers, deadline_s)
            if found is not None:
                return found
            # The newest that was listed is gone: others came after it, and the listing was old.
            if time.monotonic() + _PAUSE_S > deadline_s:
                error = PersistentTierError("read", self.target, "its listing is out of date")
                error.retryable = error.unreachable = True
                raise error
            time.sleep(_PAUSE_S)

    def _numbers(self, deadline_s: float) -> list[int]:
        names = self._storage.names_in(LOG_FOLDER, deadline_s)
        numbers = {int(name[1]) for name in map(_NAME.fullmatch, names) if name} - {0}
        if not self._storage.is_object_store:
            # A file server's listing may be half a minute old; a look-up by name is current.
            newest = max({*numbers, self._hint(deadline_s)}, default=0)
            while newest < MAX_VERSION and self.has(newest + 1, deadline_s):
                newest += 1
            if newest:
                numbers.update(range(max(1, newest - KEPT + 1), newest + 1))
        return sorted(numbers)

    def _hint(self, deadline_s: float) -> int:
        """Return a number that the newest version has reached; 0 when none is on record."""
        data = self._storage.bytes_of(_HINT, deadline_s) or b""
        return int(data) if _NUMBER.fullmatch(data) else 0

    def _decode(self, numbers: list[int], deadline_s: float) -> LogRead | None:
        """Return the newest usable version; None when the newest of ``numbers`` is gone."""
        newest, faults = numbers[-1], list[CorruptData]()
        for number in reversed(numbers[-KEPT:]):
            data = self._data(number, deadline_s)
            if data is None:
                if number == newest:
                    return None
                continue
            try:
                path = f"{self._storage.path}/{_below(number)}"
                table, doubt = decode_table(data, number, path, self._signing)
                return LogRead(newest, table, tuple(faults), doubt, tuple(numbers))
            except NewerFormat:
                raise
            except CorruptData as error:
                faults.append(error)
        return LogRead(newest, None, tuple(faults), "", tuple(numbers))

    def has(self, number: int, deadline_s: float | None = None) -> bool:
        """Return whether there is a version ``number``. One request."""
        return self._storage.has_file(_below(number), deadline_s)

    def _data(self, number: int, deadline_s: float) -> bytes | None:
        path = self._storage.path / _below(number)

        def read() -> bytes | None:
            try:
                return read_at_most(path, MAX_LOG_BYTES + 1)
            except FileNotFoundError:
                return None
            except IsADirectoryError:
                return b""  # not a file: damaged

        return self._storage.do("read", f"/{_below(number)}", read, deadline_s)

    def append(self, table: Table, deadline_s: float | None = None) -> bool:
        """Create the version ``table``; return whether it is there now, with these bytes.

        False when another writer has made a version of this number. It may still appear after the
        deadline, with the same condition. CorruptData when it is too large.
        """
        if table.number > MAX_VERSION:
            raise PersistentTierError("write", self.target, "its last number is the highest")
        below, data = _below(table.number), encode_table(table, self._signing)
        writer = f"{table.incarnation}{table.writer}"
        is_new = self._storage.put_first(below, data, writer, deadline_s)
        # The answer to a create that succeeded may have been lost.
        if not is_new and self._storage.bytes_of(below, deadline_s) != data:
            return False
        if not self._storage.is_object_store:
            self._storage.put(_HINT, str(table.number).encode(), step=None, writer=writer)
        return True

    def remove_old(self, number: int, listed: Iterable[int] = ()) -> None:
        """Remove what ``number``, the newest version, makes needless.

        ``listed``: versions that are known to be there, as after a crash.
        """
        for old in sorted({*listed, number - KEPT}):
            if 1 < old <= number - KEPT:
                path = self._storage.path / _below(old)
                self._storage.do(
                    "remove", f"/{_below(old)}", functools.partial(path.unlink, missing_ok=True)
                )


def _name(number: int) -> str:
    return f"{number:012d}.json"


def _below(number: int) -> str:
    return f"{LOG_FOLDER}/{_name(number)}"
