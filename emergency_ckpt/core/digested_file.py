"""A small JSON file: a value with its digest. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from emergency_ckpt.errors import CorruptData, OtherFormat
from emergency_ckpt.json_decoders import decoder_of

T = TypeVar("T")


class Versioned(msgspec.Struct, frozen=True):
    """The fields that a file of any version has."""

    format: int


class DigestedFile(Generic[T]):
    """The codec of one kind of file: ``{"format":1,"digest":...,kind:value}``.

    ``digest``: SHA-256 (hex) of the bytes of the value in the file; in formats from 2 on, of these
    bytes after the format's number and a newline. So one wrong bit of ``format`` looks like damage.

    Args:
      kind: the name of the value in the file.
      content: the type that the value decodes to.
      limit_bytes: of a whole file.
      version: the number of the format; files of other numbers are refused.
    """

    def __init__(self, kind: str, content: type[T], *, limit_bytes: int, version: int = 1) -> None:
        self._kind = kind
        self._written_version = version
        self._limit_bytes = limit_bytes
        self._content = decoder_of(content)
        fields: list[Any] = [("format", int), ("digest", str), (kind, msgspec.Raw)]
        self._file = decoder_of(
            msgspec.defstruct("File", fields, frozen=True, forbid_unknown_fields=True)
        )
        self._other_file = decoder_of(msgspec.defstruct("OtherFile", fields, frozen=True))
        self._version = decoder_of(Versioned)

    def encode(self, value: T) -> bytes:
        """Return the bytes of the file. CorruptData for more bytes than a reader takes."""
        version, body = self._written_version, msgspec.json.encode(value)
        digest = _digest_of(version, body)
        file = {"format": version, "digest": digest, self._kind: msgspec.Raw(body)}
        data = msgspec.json.encode(file)
        if len(data) > self._limit_bytes:
            raise CorruptData("encode", self._kind, f"it has more than {self._limit_bytes} bytes")
        return data

    def decode(self, data: bytes, target: str) -> T:
        """Return the value of a file.

        CorruptData, which names ``target``; OtherFormat for another format whose digest is right.
        """
        if len(data) > self._limit_bytes:
            raise CorruptData("decode", target, f"it is larger than {self._limit_bytes} bytes")
        try:
            version = self._version.decode(data).format
            if version < 1:
                raise CorruptData("decode", target, f"there is no format {version}")
            is_other = version != self._written_version
            file: Any = (self._other_file if is_other else self._file).decode(data)
            body = bytes(getattr(file, self._kind))
            actual = _digest_of(version, body)
            if actual != file.digest:
                problem = "the digest differs"
                raise CorruptData("decode", target, problem, expected=file.digest, actual=actual)
            if is_other:
                raise self._other_format(version, target)
            return self._content.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error

    def _other_format(self, version: int, target: str) -> OtherFormat:
        is_newer = version > self._written_version
        age, way_on = ("a newer", "") if is_newer else ("an older", ", or begin in a new directory")
        return OtherFormat(
            "decode",
            target,
            f"{age} version of this package wrote it",
            expected=self._written_version,
            actual=version,
            hint=f"restore with that version{way_on}",
        )


def _digest_of(version: int, body: bytes) -> str:
    """Return the SHA-256 of a value in a file of the format ``version``, in hex."""
    covered = hashlib.sha256(f"{version}\n".encode() if version > 1 else b"")
    covered.update(body)
    return covered.hexdigest()
