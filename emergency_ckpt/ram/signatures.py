"""Signatures of the small files of a ramdisk, which decide what is restored. See FORMAT.md.

A signed file is known by its field ``file``, which is the unsigned one. The signature covers its
name in the process directory and its bytes, so nobody without the run's secret can change, forge or
move a file. An earlier file of the same name can be put back: then the host has an older save,
which a restore allows for.
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec

from emergency_ckpt.core.keys import RunSecret
from emergency_ckpt.errors import CorruptData, NotSigned
from emergency_ckpt.json_decoders import decoder_of

FORMAT_VERSION = 1
PURPOSE = "ramdisk"
OVERHEAD_BYTES = 256
"""An upper bound of the bytes that a signature adds to a file."""

UNSIGNED = "it is not signed"
OTHER_SECRET = "it was signed with another secret"  # noqa: S105  a text for people

_KEY_ID = re.compile(r"[0-9a-f]{16}")
_MAC = re.compile(r"[0-9a-f]{64}")


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: msgspec.Raw
    format: int
    key: str
    mac: str


class Signer:
    """Signs files of one run, and checks files that any process of the run signed."""

    def __init__(self, key: bytes) -> None:
        """``key``: 32 bytes, equal on all processes and in all lives of the run."""
        self._key = key
        self.key_id = hmac.digest(key, b"key id", "sha256")[:8].hex()

    @classmethod
    def of(cls, secret: RunSecret) -> Signer | None:
        """Return the signer of a run, or None for a made-up secret, which proves nothing."""
        key = secret.key_for(PURPOSE)
        return None if key is None else cls(key)

    def sign(self, name: str, file: bytes) -> bytes:
        """Return the signed file. ``name``: its path below the process directory."""
        signed = _Signed(msgspec.Raw(file), FORMAT_VERSION, self.key_id, self._mac(name, file))
        return msgspec.json.encode(signed)

    def is_ours(self, name: str, file: bytes, mac: str) -> bool:
        """Return True when ``mac`` is valid for the file and key. Compares in constant time."""
        return hmac.compare_digest(self._mac(name, file).encode(), mac.encode())

    def _mac(self, name: str, file: bytes) -> str:
        mac = hmac.new(self._key, name.encode() + b"\0", hashlib.sha256)
        mac.update(file)
        return mac.hexdigest()


def signed(name: str, file: bytes, signer: Signer | None) -> bytes:
    """Return the bytes to write: the signed file, or ``file`` itself without a signer."""
    return file if signer is None else signer.sign(name, file)


def open_signed(name: str, data: bytes, signer: Signer | None) -> tuple[bytes, str]:
    """Return the inner file and the reason not to trust it: UNSIGNED, OTHER_SECRET or "".

    Without a signer every file is trusted, signed or not.

    Raises:
      CorruptData: the file names this secret, but its signature is wrong.
    """
    try:
        found = decoder_of(_Signed).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return data, "" if signer is None else UNSIGNED  # the caller decodes it
    file = bytes(found.file)
    well_formed = _KEY_ID.fullmatch(found.key) and _MAC.fullmatch(found.mac)
    if found.format != FORMAT_VERSION or not well_formed:
        raise CorruptData("open", name, "unknown format of a signed file")
    if signer is None:
        return file, ""
    if found.key != signer.key_id:
        return file, OTHER_SECRET
    if not signer.is_ours(name, file, found.mac):
        raise CorruptData("open", name, "its signature is wrong: the file was changed")
    return file, ""


def check_believed(name: str, doubt: str) -> None:
    """Raise NotSigned with ``doubt``, the reason not to trust a valid file, unless it is empty."""
    if doubt:
        raise NotSigned(
            "open",
            name,
            doubt,
            hint="it is kept until a save needs the room; docs/security.md describes how to change"
            " a secret",
        )
