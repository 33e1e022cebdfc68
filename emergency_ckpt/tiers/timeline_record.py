"""``timeline.json``: the record of rolled-back saves. The same file in both tiers."""

from __future__ import annotations

import hashlib

import msgspec

from emergency_ckpt.core.timeline import Timeline, problem_of
from emergency_ckpt.errors import CorruptData

TIMELINE_NAME = "timeline.json"
LIMIT_BYTES = 64 << 10
_VERSION = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``digest``: SHA-256 (hex) of the bytes of ``timeline`` in the file."""

    format: int
    digest: str
    timeline: msgspec.Raw


def encode_timeline(timeline: Timeline) -> bytes:
    """Return the bytes of the file."""
    encoded = msgspec.json.encode(timeline)
    digest = hashlib.sha256(encoded).hexdigest()
    return msgspec.json.encode(_File(_VERSION, digest, msgspec.Raw(encoded)))


def decode_timeline(data: bytes, target: str) -> Timeline:
    """Return the timeline of a file. CorruptData is the only error."""
    if len(data) > LIMIT_BYTES:
        raise CorruptData("decode", target, f"it is larger than {LIMIT_BYTES} bytes")
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.format != _VERSION:
            raise CorruptData(
                "decode", target, "unknown version", expected=_VERSION, actual=file.format
            )
        actual = hashlib.sha256(file.timeline).hexdigest()
        if actual != file.digest:
            raise CorruptData(
                "decode", target, "the digest differs", expected=file.digest, actual=actual
            )
        timeline = msgspec.json.decode(file.timeline, type=Timeline)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptData("decode", target, f"not such a file: {error!s:.300}") from error
    problem = problem_of(timeline)
    if problem:
        raise CorruptData("decode", target, problem)
    return timeline
