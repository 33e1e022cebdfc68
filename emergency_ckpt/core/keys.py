"""The secret of a run, its keys for each purpose, and what proves that its writer had it. Pure.

1. ``RunSecret`` and ``derive_key``: the keys.
2. ``seal_value`` and ``open_value``: values for a store that any process can write to. A sealed
   value is ``tag (16) | number (4) | writer (4) | value``; numbers are big-endian. The tag is
   HMAC-SHA256, cut to 16 bytes, of ``length of name (4) | name | number | writer | value``: a value
   that was sealed for one name is not valid under another.
3. ``StepSigning``: the keyed digest by which a job recognises the files in storage that it wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import NamedTuple

import msgspec
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

    def key_for(self, purpose: str) -> bytes | None:
        """Return this run's key of 32 bytes for ``purpose``; None for a generated secret.

        A generated secret proves nothing: other lives have another one, and anyone with access to
        the coordination service can read it.
        """
        return derive_key(self.value, purpose, self.run_id) if self.given else None


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


PURPOSE = "persistent step"
NOT_SIGNED = "it is not signed"
OTHER_KEY = "it is signed with another secret"
_KEY_ID_BYTES = 8


class StepSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signature in a marker or a version of the log.

    Attributes:
      key: id of the key, which reveals nothing about it: 16 hexadecimal digits.
      mac: HMAC-SHA256 of the file's kind and of its value's bytes, 64 hexadecimal digits.
    """

    key: str
    mac: str


@dataclasses.dataclass(frozen=True)
class StepSigning:
    """Signs the steps of one job and checks the signatures of others.

    Attributes:
      key: 32 bytes; None: nothing is signed, and no signature can be checked.
      required: a step that is not signed with ``key`` must not be restored.
    """

    key: bytes | None = dataclasses.field(default=None, repr=False)
    required: bool = False

    def sign(self, kind: str, data: bytes) -> StepSignature | None:
        """Return the signature of a file of ``kind`` with ``data``; None without a key."""
        if self.key is None:
            return None
        return StepSignature(_key_id(self.key), _mac(self.key, kind, data))

    def doubt(self, kind: str, data: bytes, signature: StepSignature | None) -> str:
        """Return why the writer of ``data`` is unknown; empty when this job's key signed it.

        Empty also without a key. A removed signature or another key's id gives a reason, never an
        empty text. ValueError when the signature has this key's id and does not match ``data``.
        """
        if self.key is None:
            return ""
        if signature is None:
            return NOT_SIGNED
        if not _same(signature.key, _key_id(self.key)):
            return OTHER_KEY
        if not _same(signature.mac, _mac(self.key, kind, data)):
            raise ValueError("it was altered after it had been signed")
        return ""

    def rejection_reason(self, doubt: str) -> str:
        """Return why a step with ``doubt`` must not be restored; empty when it may be."""
        if not doubt or not self.required:
            return ""
        return f"{doubt}, and require has 'signed'"


def step_signing(secret: RunSecret, *, required: bool) -> StepSigning:
    """Return how a job with ``secret`` signs; a generated secret signs nothing.

    The key is of no run: a job restores steps that another run with the same secret has saved. The
    marker names that run and is signed with it.
    """
    key = derive_key(secret.value, PURPOSE, "") if secret.given else None
    return StepSigning(key, required)


def _key_id(key: bytes) -> str:
    return hmac.digest(key, b"name of the key", hashlib.sha256)[:_KEY_ID_BYTES].hex()


def _mac(key: bytes, kind: str, data: bytes) -> str:
    return hmac.digest(key, f"{kind} ".encode() + data, hashlib.sha256).hex()


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(errors="replace"), b.encode())
