"""The keyed digest by which a job recognises the files in storage that it wrote. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

import msgspec

from emergency_ckpt.core.secret.derived_keys import RunSecret, derive_key

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
