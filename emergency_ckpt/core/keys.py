"""The secret of a run, its keys for each purpose, and what proves that its writer had it. Pure.

1. ``RunSecret`` and ``derive_key``: the keys.
2. ``seal_value`` and ``open_value``: values for a store that any process can write to. A sealed
   value is ``tag (16) | number (4) | writer (4) | value``; numbers are big-endian. The tag is
   HMAC-SHA256, cut to 16 bytes, of ``length of name (4) | name | number | writer | value``: a value
   that was sealed for one name is not valid under another.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class RunSecret:
    """The secret that all processes of a run share. Its repr never shows it.

    Attributes:
      run_id: the run.
      value: 32 bytes or more.
      given: True when the user gave it. Otherwise the job generated it at this start: the next
        start has another one, and anyone with access to the coordination service can read it.
    """

    run_id: str
    value: bytes = dataclasses.field(repr=False)
    given: bool


def derive_key(secret: bytes, purpose: str, run_id: str) -> bytes:
    """Return the key of 32 bytes for ``purpose`` in the run ``run_id``: HKDF-SHA256.

    All processes and all lives of a run derive the same key. No key reveals another one or the
    secret.
    """
    fields = (b"emergency_ckpt key", purpose.encode(), run_id.encode())
    # Each field is preceded by its length, so that different inputs have different encodings.
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


_TAG_BYTES = 16
_NUMBER_BYTES = 4
_HEADER_BYTES = _TAG_BYTES + 2 * _NUMBER_BYTES
_MAX_NUMBER = (1 << (8 * _NUMBER_BYTES)) - 1


class OpenedValue(NamedTuple):
    """A value as it was sealed.

    Attributes:
      number: rises with each value that ``writer`` sets at a name again; 0 for one set once.
      writer: the process that sealed it.
    """

    number: int
    writer: int
    value: bytes


def seal_value(key: bytes, name: str, opened: OpenedValue) -> bytes:
    """Return ``opened`` sealed for ``name``; numbers are taken modulo 2**32."""
    signed = _uint32(opened.number) + _uint32(opened.writer) + opened.value
    return _tag(key, name, signed) + signed


def open_value(key: bytes, name: str, sealed: bytes) -> OpenedValue | None:
    """Return the value sealed for ``name``; None when it was not sealed with ``key`` for it."""
    tag, signed = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
    if len(sealed) < _HEADER_BYTES or not hmac.compare_digest(tag, _tag(key, name, signed)):
        return None
    number, writer = signed[:_NUMBER_BYTES], signed[_NUMBER_BYTES : 2 * _NUMBER_BYTES]
    value = signed[2 * _NUMBER_BYTES :]
    return OpenedValue(int.from_bytes(number, "big"), int.from_bytes(writer, "big"), value)


def _tag(key: bytes, name: str, signed: bytes) -> bytes:
    encoded = name.encode()
    return hmac.digest(key, _uint32(len(encoded)) + encoded + signed, "sha256")[:_TAG_BYTES]


def _uint32(number: int) -> bytes:
    return (number & _MAX_NUMBER).to_bytes(_NUMBER_BYTES, "big")
