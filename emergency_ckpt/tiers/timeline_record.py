"""``timeline.json``: the record of rolled-back saves. The same file in both tiers."""

from __future__ import annotations

from emergency_ckpt.core.limits import MAX_TIMELINE_BYTES
from emergency_ckpt.core.timeline import Timeline, problem_of
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.tiers.digested_file import DigestedFile

TIMELINE_NAME = "timeline.json"

_FILE = DigestedFile("timeline", Timeline, version=1, limit_bytes=MAX_TIMELINE_BYTES)


def encode_timeline(timeline: Timeline) -> bytes:
    """Return the bytes of the file."""
    return _FILE.encode(timeline)


def decode_timeline(data: bytes, target: str) -> Timeline:
    """Return the timeline of a file. CorruptData is the only error."""
    timeline = _FILE.decode(data, target)
    problem = problem_of(timeline)
    if problem:
        raise CorruptData("decode", target, problem)
    return timeline
