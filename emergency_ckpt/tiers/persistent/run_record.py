"""``run/<number>.json``: the record of the run that saves in a directory. See FORMAT.md."""

from __future__ import annotations

import dataclasses
import functools
import re

from emergency_ckpt.core.limits import MAX_SMALL_FILE_BYTES
from emergency_ckpt.core.run_claim import RunRecord, problem_of
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.tiers.digested_file import DigestedFile
from emergency_ckpt.tiers.persistent.marker import HOST_STATE
from emergency_ckpt.tiers.storage.directory import StorageDirectory, read_at_most

RUN_FOLDER = f"{HOST_STATE}/run"
_FILE = DigestedFile("run", RunRecord, version=1, limit_bytes=MAX_SMALL_FILE_BYTES)
_NAME = re.compile(r"([0-9]{12})\.json")
_LAST = 10**12 - 1
_ATTEMPTS = 5
_MOST_READ = 4
"""More files than crashes leave; this program did not make the rest."""


def encode_run(record: RunRecord) -> bytes:
    """Return the bytes of a file."""
    return _FILE.encode(record)


def decode_run(data: bytes, target: str) -> RunRecord:
    """Return the record of a file. CorruptData is the only error."""
    record = _FILE.decode(data, target)
    problem = problem_of(record)
    if problem:
        raise CorruptData("decode", target, problem)
    return record


@dataclasses.dataclass(frozen=True)
class Found:
    """The record of a directory, as found.

    Attributes:
      number: of the newest file; 0 when there is none.
      record: of the newest file that can be decoded, or None.
      damage: the error when files exist and none can be decoded, or None.
      older: the numbers of all files but the newest.
    """

    number: int = 0
    record: RunRecord | None = None
    damage: CorruptData | None = None
    older: tuple[int, ...] = ()


class RunFile:
    """The record of one directory. All methods block for storage; PersistentTierError.

    Each change is a new file of the next number, created only if absent. So of two writers that
    read the same record only one changes it, on any storage.
    """

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage

    @property
    def target(self) -> str:
        """Return the path of the folder with its files."""
        return f"{self._storage.path}/{RUN_FOLDER}"

    def read(self, deadline_s: float | None = None) -> Found:
        """Return the record: the newest file that can be decoded, else the damage. Blocks."""
        deadline_s = self._storage.deadline_s(deadline_s)
        for _ in range(_ATTEMPTS):
            numbers = self._numbers(deadline_s)
            if not numbers:
                return Found()
            found = self._decode(numbers, deadline_s)
            if found is not None:
                return found
        error = PersistentTierError("read", self.target, "it changed during every read")
        error.retryable = True
        raise error

    def _numbers(self, deadline_s: float) -> list[int]:
        try:
            names = self._storage.names_in(RUN_FOLDER, deadline_s)
        except PersistentTierError as error:
            if not isinstance(error.__cause__, NotADirectoryError):
                raise
            return []  # not a folder: no run has saved there, and a save reports it
        numbers = {int(name[1]) for name in map(_NAME.fullmatch, names) if name}
        if not self._storage.is_object_store:
            # A file server's listing may be half a minute old; a look-up by name is current.
            newest = max(numbers, default=0)
            while newest < _LAST and self._data(newest + 1, deadline_s) is not None:
                newest += 1
                numbers.add(newest)
        return sorted(numbers)

    def _decode(self, numbers: list[int], deadline_s: float) -> Found | None:
        """Return the newest valid record, or None when the newest file was replaced meanwhile."""
        damage: CorruptData | None = None
        newest, older = numbers[-1], tuple(numbers[:-1])
        for number in reversed(numbers[-_MOST_READ:]):
            data = self._data(number, deadline_s)
            if data is None and number == newest:
                return None
            try:
                if data is not None:
                    return Found(newest, decode_run(data, self._path(number)), older=older)
            except CorruptData as error:
                damage = damage or error
        return Found(newest, damage=damage, older=older)

    def _data(self, number: int, deadline_s: float) -> bytes | None:
        path = self._storage.path / _below(number)

        def read() -> bytes | None:
            try:
                return read_at_most(path, MAX_SMALL_FILE_BYTES + 1)
            except FileNotFoundError:
                return None
            except IsADirectoryError:
                return b""  # not a file: damaged

        return self._storage.do("read", f"/{_below(number)}", read, deadline_s)

    def _path(self, number: int) -> str:
        return f"{self._storage.path}/{_below(number)}"

    def replace(self, found: Found, record: RunRecord, deadline_s: float | None = None) -> None:
        """Replace ``found`` by ``record`` if it is still the newest; ``read`` shows whether it was.

        The change may happen after the deadline, with the same condition.
        """
        if found.number >= _LAST:
            raise PersistentTierError(
                "write", self._path(found.number), "its number is the highest", hint="remove it"
            )
        below = _below(found.number + 1)
        self._storage.put_first(below, encode_run(record), record.life, deadline_s)

    def remove_older(self, found: Found) -> None:
        """Remove the files that the newest one replaced."""
        for number in found.older:
            path = self._storage.path / _below(number)
            self._storage.do(
                "remove", f"/{_below(number)}", functools.partial(path.unlink, missing_ok=True)
            )


def _below(number: int) -> str:
    return f"{RUN_FOLDER}/{number:012d}.json"
