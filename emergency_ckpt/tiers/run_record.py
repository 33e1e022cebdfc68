"""``run.json``: on record which run saves in a persistent directory. FORMAT.md specifies it."""

from __future__ import annotations

import hashlib

import msgspec

from emergency_ckpt.core.run_claim import RunRecord, problem_of
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.persistent_marker import HOST_STATE
from emergency_ckpt.tiers.storage_directory import StorageDirectory

RUN_NAME = "run.json"
LIMIT_BYTES = 4096
_VERSION = 1
_BELOW = f"{HOST_STATE}/{RUN_NAME}"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``digest``: SHA-256 (hex) of the bytes of ``run`` as they lie in the file."""

    format: int
    digest: str
    run: msgspec.Raw


def encode_run(record: RunRecord) -> bytes:
    """The file."""
    encoded = msgspec.json.encode(record)
    digest = hashlib.sha256(encoded).hexdigest()
    return msgspec.json.encode(_File(_VERSION, digest, msgspec.Raw(encoded)))


def decode_run(data: bytes, target: str) -> RunRecord:
    """The record from its file. CorruptData, whatever is wrong with it."""
    if len(data) > LIMIT_BYTES:
        raise CorruptData("decode", target, f"it is larger than {LIMIT_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.format != _VERSION:
            raise CorruptData(
                "decode", target, "unknown version", expected=_VERSION, actual=file.format
            )
        actual = hashlib.sha256(file.run).hexdigest()
        if actual != file.digest:
            raise CorruptData(
                "decode", target, "the digest differs", expected=file.digest, actual=actual
            )
        record = msgspec.json.decode(file.run, type=RunRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error
    problem = problem_of(record)
    if problem:
        raise CorruptData("decode", target, problem)
    return record


class RunFile:
    """The record of one directory. All methods block for storage; PersistentTierError."""

    def __init__(self, storage: StorageDirectory) -> None:
        self._storage = storage
        self._path = storage.path / _BELOW

    @property
    def target(self) -> str:
        """Where it lies."""
        return str(self._path)

    def read(self, deadline_s: float | None = None) -> RunRecord | None:
        """The record; None when there is none. CorruptData."""

        def read() -> bytes | None:
            try:
                with self._path.open("rb") as file:
                    return file.read(LIMIT_BYTES + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None

        data = self._storage.do("read", f"/{_BELOW}", read, deadline_s)
        return None if data is None else decode_run(data, self.target)

    def create(self, record: RunRecord) -> bool:
        """Write it where there is none; False when there is one, which may be this one."""
        return self._storage.put_first(_BELOW, encode_run(record), record.life)

    def replace(self, record: RunRecord) -> None:
        """Write it in place of what is there."""
        self._storage.put(_BELOW, encode_run(record), step=None)
