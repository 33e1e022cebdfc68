"""A small JSON file of one value with a format number and a digest, used by both tiers."""

from __future__ import annotations

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from emergency_ckpt.errors import CorruptData

T = TypeVar("T")


class DigestedFile(Generic[T]):
    """The codec of one kind of file: ``{"format": version, "digest": ..., field: value}``.

    ``digest`` is the SHA-256 (hex) of the bytes of the value in the file.
    """

    def __init__(self, field: str, content: type[T], *, version: int, limit_bytes: int) -> None:
        """Describe the file; ``content`` is the type that its value decodes to."""
        self._field = field
        self._version = version
        self._limit_bytes = limit_bytes
        self._content = msgspec.json.Decoder(content)
        fields = [("format", int), ("digest", str), (field, msgspec.Raw)]
        self._file = msgspec.json.Decoder(
            msgspec.defstruct("File", fields, frozen=True, forbid_unknown_fields=True)
        )

    def encode(self, value: object) -> bytes:
        """Return the bytes of the file."""
        encoded = msgspec.json.encode(value)
        digest = hashlib.sha256(encoded).hexdigest()
        file = {"format": self._version, "digest": digest, self._field: msgspec.Raw(encoded)}
        return msgspec.json.encode(file)

    def decode(self, data: bytes, target: str) -> T:
        """Return the value of a file. CorruptData, which names ``target``, is the only error."""
        if len(data) > self._limit_bytes:
            problem = f"it is larger than {self._limit_bytes} bytes"
            raise CorruptData("decode", target, problem)
        try:
            file: Any = self._file.decode(data)
            encoded = getattr(file, self._field)
            self._compare(target, "unknown version", self._version, file.format)
            actual = hashlib.sha256(encoded).hexdigest()
            self._compare(target, "the digest differs", file.digest, actual)
            return self._content.decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error

    def _compare(self, target: str, problem: str, expected: object, actual: object) -> None:
        if actual != expected:
            raise CorruptData("decode", target, problem, expected=expected, actual=actual)
