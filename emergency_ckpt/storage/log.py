"""``host_state/log/<number>.json``: the versions of the step log. FORMAT.md specifies them."""

from __future__ import annotations

import functools
import re
import time
from typing import NamedTuple

import msgspec

from emergency_ckpt.core.digested_file import DigestedFile
from emergency_ckpt.core.limits import MAX_LOG_BYTES, MAX_VERSION
from emergency_ckpt.core.step_log import Entry, Key, Table, problem_of
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, NewerFormat, PersistentTierError
from emergency_ckpt.storage.directory import StorageDirectory, read_at_most
from emergency_ckpt.storage.marker import HOST_STATE

LOG_FOLDER = f"{HOST_STATE}/log"
KEPT = 8
"""So many of the newest versions stay."""

_CHANGES = 64
"""So many steps a version may name that differ from its base, or an eighth of all."""


class Version(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One version in its file: a table, or what of it differs from that of an older version.

    Attributes:
      number, run_id, from_dir, incarnation, writer, chain, greatest: as in ``Table``.
      steps: all of the table; with a ``base`` those that it has not, or otherwise.
      base: the version, whole itself, that the others are taken from; 0 without one.
      left: steps of the base that the table does not have.
      before: the base of the versions before ``base``, or before this one; 0 without one.
    """

    number: int
    run_id: str
    from_dir: bool
    incarnation: str
    writer: str = ""
    chain: Timeline | None = None
    steps: tuple[Entry, ...] = ()
    base: int = 0
    left: tuple[Key, ...] = ()
    before: int = 0
    greatest: int = 0

    def table(self, base: Table | None) -> Table:
        """Return the whole table."""
        steps = self.steps
        if base is not None:
            entries = {entry.key: entry for entry in base.steps}
            for key in self.left:
                entries.pop(key, None)
            entries.update((entry.key, entry) for entry in self.steps)
            steps = tuple(sorted(entries.values(), key=lambda entry: entry.key))
        return Table(
            self.number,
            self.run_id,
            self.from_dir,
            self.incarnation,
            self.writer,
            self.chain,
            steps,
            self.greatest,
        )


_FILE = DigestedFile("version", Version, limit_bytes=MAX_LOG_BYTES)
_NAME = re.compile(r"([0-9]{12})\.json", re.ASCII)
_HINT = f"{LOG_FOLDER}/newest"
"""On a file system, a number that the newest version has reached. Nothing depends on it but where
the newest version is looked for, as by a listing."""
_NUMBER = re.compile(rb"[0-9]{1,12}")
_PAUSE_S = 0.5


def encode_version(version: Version) -> bytes:
    """Return the bytes of a version. CorruptData when it is too large."""
    return _FILE.encode(version)


def decode_version(data: bytes, number: int, target: str) -> Version:
    """Return version ``number``. CorruptData when it is damaged, or another version."""
    version = _FILE.decode(data, target)
    if version.number != number or not 0 <= version.base < number:
        problem = f"it is version {version.number}, with the base {version.base}"
        raise CorruptData("decode", target, problem)
    return version


class LogRead(NamedTuple):
    """The log as read.

    Attributes:
      number: of the newest version; 0 without any.
      table: of the newest version that can be used, or None.
      faults: of newer versions, which cannot.
      listed: the numbers that were listed.
      base: the newest whole version that ``table`` is made of, or is.
      before: the number of the base before that; 0 without one.
    """

    number: int = 0
    table: Table | None = None
    faults: tuple[CorruptData, ...] = ()
    listed: tuple[int, ...] = ()
    base: Table | None = None
    before: int = 0


class StepLog:
    """The log of one directory. All methods block for storage; PersistentTierError.

    The ``KEPT`` newest versions have no gaps.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage

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
        data: bytes | None = None
        while True:
            before, data = data, self._storage.bytes_of(_HINT, deadline_s) or b""
            number = int(data) if _NUMBER.fullmatch(data) else 0
            # Without its version it is that of another directory, as in a copy; or it has grown.
            if not number or self.has(number, deadline_s):
                return number
            if data == before:
                return 0

    def _decode(self, numbers: list[int], deadline_s: float) -> LogRead | None:
        """Return the newest usable version; None when the newest of ``numbers`` is gone."""
        newest, faults = numbers[-1], list[CorruptData]()
        for number in reversed(numbers[-KEPT:]):
            try:
                found = self._version(number, deadline_s)
                if found is None:
                    if number == newest:
                        return None
                    continue
                return found._replace(number=newest, faults=tuple(faults), listed=tuple(numbers))
            except NewerFormat:
                raise
            except CorruptData as error:
                faults.append(error)
        return LogRead(newest, None, tuple(faults), tuple(numbers))

    def _version(self, number: int, deadline_s: float) -> LogRead | None:
        """Return the log as of version ``number``; None: it is gone.

        CorruptData when it, or its base, cannot be used.
        """
        data = self._data(number, deadline_s)
        if data is None:
            return None
        target = f"{self._storage.path}/{_below(number)}"
        version = decode_version(data, number, target)
        base: Table | None = None
        if version.base:
            data = self._data(version.base, deadline_s)
            below = f"{self._storage.path}/{_below(version.base)}"
            if data is None:
                raise CorruptData("read", target, f"its base {below} is gone")
            whole = decode_version(data, version.base, below)
            if whole.base:
                raise CorruptData("read", target, f"its base {below} is not whole")
            base = whole.table(None)
        table = version.table(base)
        problem = problem_of(table)
        if problem:
            raise CorruptData("decode", target, problem)
        return LogRead(number, table, (), (), base or table, version.before)

    def is_newest(self, number: int, deadline_s: float | None = None) -> bool:
        """Return whether no version comes after ``number``. One request of an object store.

        The absence of the next one alone does not show it: that may be among those removed.
        """
        return max(self._numbers(self._storage.deadline_s(deadline_s)), default=0) == number

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

    def append(
        self, table: Table, after: LogRead, deadline_s: float | None = None
    ) -> LogRead | None:
        """Create the version ``table``; return the log with it, once it is there.

        None when another writer has made a version of this number, or has long ago and removed it.
        It may still appear after the deadline, with the same condition. CorruptData when it is too
        large.

        Args:
          after: the log that it was made from.
        """
        if table.number > MAX_VERSION:
            last = f"{self._storage.path}/{_below(MAX_VERSION)}"
            raise PersistentTierError("write", last, "its number is the highest", hint="remove it")
        version, base = _version_of(table, after)
        below, data = _below(table.number), encode_version(version)
        is_new = self._storage.put_first(below, data, deadline_s)
        # The answer to a create that succeeded may have been lost.
        if not is_new and self._storage.bytes_of(below, deadline_s) != data:
            return None
        if not self.is_newest(table.number, deadline_s):
            return None
        if not self._storage.is_object_store:
            number = str(table.number).encode()
            self._storage.put(_HINT, number, step=None)
        return LogRead(table.number, table, base=base, before=version.before)

    def remove_old(self, newest: LogRead, after: LogRead) -> None:
        """Remove what ``newest``, just written after ``after``, makes needless."""
        base = 0 if newest.base is None else newest.base.number
        needed = {base, newest.before, 0}
        for old in sorted({*after.listed, newest.number - KEPT, after.before} - needed):
            if 0 < old <= newest.number - KEPT:
                path = self._storage.path / _below(old)
                self._storage.do(
                    "remove", f"/{_below(old)}", functools.partial(path.unlink, missing_ok=True)
                )


def _version_of(table: Table, after: LogRead) -> tuple[Version, Table]:
    """Return the version of ``table`` for its file, and the whole version that it is made of."""
    fields = (table.number, table.run_id, table.from_dir, table.incarnation, table.writer)
    base = after.base
    greatest = table.greatest
    if base is None:
        return Version(*fields, table.chain, table.steps, greatest=greatest), table
    # Tables share the entries that they have in common.
    of_base, of_table = set(map(id, base.steps)), set(map(id, table.steps))
    changed = tuple(entry for entry in table.steps if id(entry) not in of_base)
    gone = {entry.key for entry in base.steps if id(entry) not in of_table}
    left = tuple(sorted(gone - {entry.key for entry in changed}))
    if len(changed) + len(left) > max(_CHANGES, len(table.steps) // 8):
        whole = Version(*fields, table.chain, table.steps, before=base.number, greatest=greatest)
        return whole, table
    version = Version(*fields, table.chain, changed, base.number, left, after.before, greatest)
    return version, base


def _name(number: int) -> str:
    return f"{number:012d}.json"


def _below(number: int) -> str:
    return f"{LOG_FOLDER}/{_name(number)}"
