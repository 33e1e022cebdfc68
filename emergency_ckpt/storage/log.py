"""``host_state/log/<number>.json``: the versions of the step log, which FORMAT.md specifies."""

from __future__ import annotations

import dataclasses
import errno
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from absl import logging

from emergency_ckpt.core.digested_file import DigestedFile
from emergency_ckpt.core.limits import MAX_LOG_BYTES, MAX_MARKER_BYTES, MAX_VERSION
from emergency_ckpt.core.step_log import Table, problem_of
from emergency_ckpt.errors import CorruptData, OtherFormat, PersistentTierError, StorageLost
from emergency_ckpt.storage.calls import read_twice
from emergency_ckpt.storage.directory import StorageDirectory, read_at_most, written_for
from emergency_ckpt.storage.marker import HOST_STATE

LOG_FOLDER = f"{HOST_STATE}/log"
KEPT = 8
"""So many of the newest versions stay."""

_FILE = DigestedFile("version", Table, limit_bytes=MAX_LOG_BYTES, version=2)
_NAME = re.compile(r"([0-9]{12})\.json", re.ASCII)
_HINT = f"{LOG_FOLDER}/newest"
"""A file with a number that the newest version has reached, on a file system alone. Like a listing,
the number only serves to find the newest version."""
_NUMBER = re.compile(rb"[0-9]{1,12}")
_NO_FILE_ERRNOS = frozenset({errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOTDIR})
_PAUSE_S = 0.5


def encode_version(table: Table) -> bytes:
    """Return the bytes of a version. CorruptData when it is too large."""
    return _FILE.encode(table)


def decode_version(data: bytes, number: int, target: str) -> Table:
    """Return version ``number``. CorruptData when ``data`` are damaged, or another version."""
    table = _FILE.decode(data, target)
    if table.number != number:
        raise CorruptData("decode", target, f"it is version {table.number}")
    if problem := problem_of(table):
        raise CorruptData("decode", target, problem)
    return table


class LogRead(NamedTuple):
    """The log as read.

    Attributes:
      number: of the newest version; 0 without any.
      table: of the newest version that can be used, or None.
      faults: the errors of newer versions, which cannot be used.
      listed: the numbers of the listed versions.
    """

    number: int = 0
    table: Table | None = None
    faults: tuple[CorruptData, ...] = ()
    listed: tuple[int, ...] = ()


@dataclasses.dataclass
class SeenVersion:
    """The greatest number of a version that this life has read or written; 0 before."""

    number: int = 0


class StepLog:
    """The log of one directory. All methods block for storage; PersistentTierError.

    The ``KEPT`` newest versions have no gaps.

    Attributes:
      target: the path of the folder with the versions.
      seen: shared by all objects that read and write the directory for one process.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self.target = f"{storage.path}/{LOG_FOLDER}"
        self.seen = SeenVersion()
        self._strays: set[int] = set()
        """Damaged versions whose numbers leave a gap: they do not count."""
        self._temporary: dict[str, int] = {}
        """Temporary files in the newest listing, each with the number of its version."""

    def read(self, deadline_s: float | None = None) -> LogRead:
        """Return the newest version that can be used; damaged newer versions are in ``faults``.

        OtherFormat when another version of this package wrote the newest version. StorageLost when
        the log ends before a version that this life has seen.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        strays: tuple[CorruptData, ...] = ()
        while True:
            numbers = self._numbers(deadline_s)
            newest = max(numbers, default=0)
            if newest < self.seen.number:
                raise self._lost(newest)
            if not numbers:
                return LogRead(faults=strays)
            version = self._decode(numbers, deadline_s)
            if version is not None and version.number:
                self.seen.number = max(self.seen.number, version.number)
                return version._replace(faults=(*strays, *version.faults))
            if version is not None:
                strays += version.faults
                continue
            # The newest listed version is gone: others came after it, and the listing was old.
            if time.monotonic() + _PAUSE_S > deadline_s:
                error = PersistentTierError("read", self.target, "its listing is out of date")
                error.retryable = error.unreachable = True
                raise error
            time.sleep(_PAUSE_S)

    def _lost(self, newest: int) -> StorageLost:
        now = f"its newest is {newest} now" if newest else "there is none now"
        return StorageLost(
            "read",
            self.target,
            f"this life has seen version {self.seen.number} of the step log, and {now}: it was"
            " unmounted, moved, removed, or replaced by an older copy",
            hint="bring it back where it was; or restart the job, which takes what is there then",
        )

    def _numbers(self, deadline_s: float) -> list[int]:
        names = self._storage.names_in(LOG_FOLDER, deadline_s)
        numbers = {int(name[1]) for name in map(_NAME.fullmatch, names) if name} - {0}
        if not self._storage.is_object_store:
            written = ((name, _NAME.fullmatch(written_for(name))) for name in names)
            self._temporary = {name: int(version[1]) for name, version in written if version}
            # A file server's listing may be half a minute old; a look-up by name is current.
            newest = max({*numbers, self._hint(deadline_s)} - self._strays, default=0)
            if newest < self.seen.number and self.has(self.seen.number, deadline_s):
                newest = self.seen.number
            while newest < MAX_VERSION and self.has(newest + 1, deadline_s):
                newest += 1
            if newest:
                numbers.update(range(max(1, newest - KEPT + 1), newest + 1))
        for stray in sorted(self._strays):
            if stray - 1 in numbers - self._strays:
                self._strays.discard(stray)  # the gap is closed
        return sorted(numbers - self._strays)

    def _hint(self, deadline_s: float) -> int:
        """Return a number that the newest version has reached; 0 without a record."""
        data: bytes | None = None
        while True:
            before, data = data, self._hint_bytes(deadline_s)
            number = int(data) if _NUMBER.fullmatch(data) else 0
            # Without its version the number is of another directory, as in a copy; or it has grown.
            if not number or self.has(number, deadline_s):
                return number
            if data == before:
                return 0

    def _hint_bytes(self, deadline_s: float) -> bytes:
        """Return what the hint says; nothing where no file has its name.

        Anybody's folder or link may have the name. The versions are found without a hint.
        """
        path = self._storage.path / _HINT

        def read() -> bytes:
            try:
                return read_at_most(path, MAX_MARKER_BYTES)
            except OSError as error:
                if error.errno in _NO_FILE_ERRNOS:
                    return b""
                raise

        return self._storage.do("read", f"/{_HINT}", read, deadline_s)

    def _decode(self, numbers: list[int], deadline_s: float) -> LogRead | None:
        """Return the newest usable version; None when the newest of ``numbers`` is gone.

        The result has the number 0 when all versions above a gap are damaged: none of them counts
        any more.
        """
        newest, faults = numbers[-1], list[CorruptData]()
        for number in range(newest, max(0, newest - KEPT), -1):
            try:
                read = partial(self._version, number, deadline_s)
                table = read_twice(read) if number in numbers else None
                if table is None and number == newest:
                    return None
                if table is None:
                    self._strays.update(range(number + 1, newest + 1))
                    return LogRead(faults=tuple(map(_as_stray, faults)))
                return LogRead(newest, table, tuple(faults), tuple(numbers))
            except OtherFormat:
                raise
            except CorruptData as error:
                faults.append(error)
        return LogRead(newest, None, tuple(faults), tuple(numbers))

    def _version(self, number: int, deadline_s: float) -> Table | None:
        """Return version ``number``; None for a missing file. CorruptData for a damaged file."""
        path = self._storage.path / _below(number)

        def read() -> bytes | None:
            try:
                return read_at_most(path, MAX_LOG_BYTES + 1)
            except FileNotFoundError:
                return None
            except IsADirectoryError:
                return b""  # not a file: damaged

        data = self._storage.do("read", f"/{_below(number)}", read, deadline_s)
        return None if data is None else decode_version(data, number, str(path))

    def versions_back(
        self, number: int, deadline_s: float | None = None
    ) -> Iterator[tuple[Table, float]]:
        """Yield version ``number`` and those before, and when each was written, by storage's clock.

        The end is before the first version that is gone or cannot be used.
        """
        deadline_s = self._storage.deadline_s(deadline_s)
        for earlier in range(number, max(0, number - KEPT), -1):
            try:
                table = self._version(earlier, deadline_s)
            except CorruptData:
                return
            written_s = self._storage.changed_s(_below(earlier), deadline_s)
            if table is None or written_s is None:
                return
            yield table, written_s

    def is_newest(self, number: int, deadline_s: float | None = None) -> bool:
        """Return whether no version comes after ``number``. One request of an object store.

        The absence of the next version alone is no proof, since old versions are removed.
        """
        return max(self._numbers(self._storage.deadline_s(deadline_s)), default=0) == number

    def has(self, number: int, deadline_s: float | None = None) -> bool:
        """Return whether there is a version ``number``. One request."""
        return self._storage.has_file(_below(number), deadline_s)

    def append(self, table: Table, deadline_s: float | None = None) -> LogRead | None:
        """Create the version ``table``; return the log with this version.

        None when another writer has made a version of this number, even one removed long ago.
        CorruptData when the version is too large. After an error at the deadline the version may
        still appear, if absent. A hint that cannot be written is only logged. The folder of the log
        is made for the first version only.
        """
        if table.number > MAX_VERSION:
            last = f"{self._storage.path}/{_below(MAX_VERSION)}"
            raise PersistentTierError("write", last, "its number is the highest", hint="remove it")
        below, data = _below(table.number), encode_version(table)
        if table.number == 1:
            self._storage.create_folder(LOG_FOLDER, deadline_s)
        is_new = self._storage.put_first(below, data, deadline_s)
        # The answer to a create that succeeded may have been lost.
        if not is_new and self._storage.bytes_of(below, deadline_s) != data:
            return None
        if not self.is_newest(table.number, deadline_s):
            return None
        if not self._storage.is_object_store:
            self._leave_hint(table.number, deadline_s)
        self.seen.number = max(self.seen.number, table.number)
        return LogRead(table.number, table)

    def _leave_hint(self, number: int, deadline_s: float | None) -> None:
        try:
            data, name = str(number).encode(), _name(number)
            self._storage.put(_HINT, data, deadline_s, temporary_name=name)
        except PersistentTierError as error:
            # The version counts: readers find it by the listing, or by its name.
            logging.warning("version %d of the step log has no hint: %s", number, error)

    def remove_old(self, newest: LogRead, after: LogRead, deadline_s: float | None = None) -> None:
        """Remove the versions that ``newest``, just written after ``after``, has replaced.

        A temporary file goes with its version: a writer that is killed leaves the file. A writer
        that is alive has not kept up with the ``KEPT`` newest versions, and writes the file again.
        """
        last = newest.number - KEPT
        old = [_name(number) for number in sorted({*after.listed, last}) if 0 < number <= last]
        temporary = sorted(name for name, number in self._temporary.items() if number <= last)
        for name in (*old, *temporary):
            path = self._storage.path / LOG_FOLDER / name
            remove = partial(path.unlink, missing_ok=True)
            self._storage.do("remove", f"/{LOG_FOLDER}/{name}", remove, deadline_s)


def _as_stray(fault: CorruptData) -> CorruptData:
    hint = "its number leaves a gap and does not count; the file may be removed"
    return CorruptData(fault.operation, fault.target, fault.problem, hint=hint)


def _name(number: int) -> str:
    return f"{number:012d}.json"


def _below(number: int) -> str:
    return f"{LOG_FOLDER}/{_name(number)}"
