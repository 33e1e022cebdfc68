"""A small JSON file: a value with its digest. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from emergency_ckpt.errors import CorruptData, NewerFormat
from emergency_ckpt.json_decoders import decoder_of

T = TypeVar("T")
VERSION = 1


class Versioned(msgspec.Struct, frozen=True):
    """The fields that a file of any version has."""

    format: int


class DigestedFile(Generic[T]):
    """The codec of one kind of file: ``{"format":1,"digest":...,kind:value}``.

    ``digest``: SHA-256 (hex) of the bytes of the value in the file; in a later format of these
    bytes after its number and a newline, so that one wrong bit of ``format`` looks like no format.
    """

    def __init__(self, kind: str, content: type[T], *, limit_bytes: int) -> None:
        """Describe the file; ``content`` is the type that its value decodes to."""
        self._kind = kind
        self._limit_bytes = limit_bytes
        self._content = decoder_of(content)
        fields: list[Any] = [
            ("format", int),
            ("digest", str),
            (kind, msgspec.Raw),
        ]
        self._file = decoder_of(
            msgspec.defstruct("File", fields, frozen=True, forbid_unknown_fields=True)
        )
        self._later_file = decoder_of(msgspec.defstruct("LaterFile", fields, frozen=True))
        self._version = decoder_of(Versioned)

    def encode(self, value: T) -> bytes:
        """Return the bytes of the file. CorruptData when they are more than a reader takes."""
        body = msgspec.json.encode(value)
        digest = hashlib.sha256(body).hexdigest()
        file = {"format": VERSION, "digest": digest, self._kind: msgspec.Raw(body)}
        data = msgspec.json.encode(file)
        if len(data) > self._limit_bytes:
            raise CorruptData("encode", self._kind, f"it has more than {self._limit_bytes} bytes")
        return data

    def decode(self, data: bytes, target: str) -> T:
        """Return the value of a file.

        CorruptData, which names ``target``; NewerFormat for a format that this version does not
        know, where its digest is right.
        """
        if len(data) > self._limit_bytes:
            raise CorruptData("decode", target, f"it is larger than {self._limit_bytes} bytes")
        try:
            version = self._version.decode(data).format
            if version < VERSION:
                raise CorruptData(
                    "decode", target, "unknown version", expected=VERSION, actual=version
                )
            is_later = version > VERSION
            file: Any = (self._later_file if is_later else self._file).decode(data)
            body = bytes(getattr(file, self._kind))
            covered = hashlib.sha256(f"{version}\n".encode() if is_later else b"")
            covered.update(body)
            actual = covered.hexdigest()
            if actual != file.digest:
                raise CorruptData(
                    "decode", target, "the digest differs", expected=file.digest, actual=actual
                )
            if is_later:
                raise NewerFormat(
                    "decode",
                    target,
                    "a newer version of this package wrote it",
                    expected=VERSION,
                    actual=version,
                    hint="restore with that version",
                )
            return self._content.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error
