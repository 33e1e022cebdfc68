"""The values of the store, and their JSON resources and errors.

Names and meanings are those of the public reference of the JSON API
(https://cloud.google.com/storage/docs/json_api/v1), so that the real clients can read them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import google_crc32c


class GcsError(Exception):
    """A refusal, sent to the client as an HTTP status with Google's JSON error body."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{status} {reason}: {message}")

    def resource(self) -> dict[str, Any]:
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [detail]}}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One live object; a new generation is a new value."""

    bucket: str
    name: str
    data: bytes
    crc32c: str
    generation: int
    created_us: int
    content_type: str

    @property
    def etag(self) -> str:
        return _base64(f"{self.generation}/1".encode())


def crc32c_of(data: bytes) -> str:
    """Return the checksum as the API has it: big-endian, in base64."""
    return _base64(google_crc32c.value(data).to_bytes(4, "big"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True, slots=True)
class Preconditions:
    """``ifGenerationMatch`` and ``ifGenerationNotMatch``. A missing object has generation 0.

    A failed Match is 412, a failed NotMatch is 304, on reads and on writes.
    """

    generation_match: int | None = None
    generation_not_match: int | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str], prefix: str = "if") -> Preconditions:
        names = (f"{prefix}GenerationMatch", f"{prefix}GenerationNotMatch")
        return cls(*(whole_number(query, name) for name in names))

    def check(self, current: StoredObject | None) -> None:
        """Raise GcsError 412 or 304 when the current state does not meet the conditions."""
        generation = 0 if current is None else current.generation
        if self.generation_match not in (None, generation):
            raise GcsError(
                412,
                "conditionNotMet",
                "At least one of the pre-conditions you specified did not hold:"
                f" ifGenerationMatch (expected {self.generation_match}, got {generation}).",
            )
        if self.generation_not_match == generation:
            raise GcsError(304, "notModified", "A NotMatch pre-condition did not hold.")


def whole_number(query: Mapping[str, str], name: str) -> int | None:
    """Return the integer query parameter ``name``, or None when absent. GcsError 400."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise GcsError(400, "invalid", f"Invalid unsigned integer for {name}: '{text[:40]}'.")
    return int(text)


def timestamp(time_us: int) -> str:
    text = datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def bucket_resource(name: str) -> dict[str, Any]:
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "location": "US-CENTRAL1",
        "locationType": "region",
        "storageClass": "STANDARD",
        "metageneration": "1",
    }


def layout_resource(name: str) -> dict[str, Any]:
    """Return how a bucket stores: "zonal" and "hierarchical" begin the names of such buckets."""
    is_zonal = name.startswith("zonal")
    return {
        "kind": "storage#storageLayout",
        "bucket": name,
        "location": "US-CENTRAL1",
        "locationType": "zone" if is_zonal else "region",
        "hierarchicalNamespace": {"enabled": is_zonal or name.startswith("hierarchical")},
    }


def object_resource(stored: StoredObject, base_url: str) -> dict[str, Any]:
    path = f"b/{stored.bucket}/o/{quote(stored.name, safe='')}"
    return {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
        "name": stored.name,
        "bucket": stored.bucket,
        "selfLink": f"{base_url}/storage/v1/{path}",
        "mediaLink": f"{base_url}/download/storage/v1/{path}"
        f"?generation={stored.generation}&alt=media",
        "generation": str(stored.generation),
        "metageneration": "1",
        "contentType": stored.content_type,
        "storageClass": "STANDARD",
        "size": str(len(stored.data)),
        "crc32c": stored.crc32c,
        "etag": stored.etag,
        "timeCreated": timestamp(stored.created_us),
        "updated": timestamp(stored.created_us),
    }
