"""The value types of the fake: buckets and objects, preconditions, and their JSON form. Pure.

Field names and meanings follow the public reference of the JSON API
(https://cloud.google.com/storage/docs/json_api/v1), so that the real clients can read them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import google_crc32c

MIB = 1 << 20

# The fields of an object that a client may set; the server sets all others.
WRITABLE_OBJECT_FIELDS = frozenset(
    {
        "cacheControl",
        "contentDisposition",
        "contentEncoding",
        "contentLanguage",
        "contentType",
        "customTime",
        "eventBasedHold",
        "metadata",
        "storageClass",
        "temporaryHold",
    }
)
SERVER_BUCKET_FIELDS = frozenset({"kind", "id", "name", "selfLink", "generation", "metageneration"})


class GcsError(Exception):
    """A refusal, sent to the client as an HTTP status with Google's JSON error body."""

    def __init__(
        self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.headers = dict(headers or {})
        super().__init__(f"{status} {reason}: {message}")

    def resource(self) -> dict[str, Any]:
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [detail]}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds of one server; a request over one is refused with 413, 400 or 507."""

    object_bytes: int = 4096 * MIB
    total_bytes: int = 16384 * MIB
    objects: int = 1_000_000
    buckets: int = 1000
    uploads: int = 10_000
    fault_rules: int = 1000
    log_records: int = 200_000
    batch_parts: int = 1000
    compose_sources: int = 32


@dataclass(frozen=True, slots=True)
class Digests:
    """The base64 digests of an object, as the API returns them. A composed object has no MD5."""

    crc32c: str
    md5: str | None

    @classmethod
    def of(cls, data: bytes, *, with_md5: bool = True) -> Digests:
        md5 = hashlib.md5(data, usedforsecurity=False).digest() if with_md5 else None
        crc = google_crc32c.value(data).to_bytes(4, "big")
        return cls(_base64(crc), None if md5 is None else _base64(md5))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True, slots=True)
class Bucket:
    name: str
    created_us: int
    metageneration: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One live object. A new generation is a new value; patching changes only metageneration.

    ``size_bytes`` is ``len(data)``, except in a finished upload, which keeps no data.
    """

    bucket: str
    name: str
    data: bytes
    size_bytes: int
    digests: Digests
    generation: int
    metageneration: int
    created_us: int
    updated_us: int
    attributes: Mapping[str, Any]
    component_count: int | None = None

    @property
    def etag(self) -> str:
        return _base64(f"{self.generation}/{self.metageneration}".encode())

    @property
    def content_type(self) -> str:
        return str(self.attributes.get("contentType", "application/octet-stream"))


@dataclass(frozen=True, slots=True)
class Preconditions:
    """``ifGenerationMatch`` and the other preconditions. A missing object has generation 0.

    A failed Match is 412, a failed NotMatch is 304, on reads and on writes.
    """

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str], prefix: str = "if") -> Preconditions:
        return cls(
            *(
                whole_number(query, f"{prefix}{name}")
                for name in (
                    "GenerationMatch",
                    "GenerationNotMatch",
                    "MetagenerationMatch",
                    "MetagenerationNotMatch",
                )
            )
        )

    def check(self, current: StoredObject | None) -> None:
        """Raise GcsError 412 or 304 when the current state does not meet the conditions."""
        generation = 0 if current is None else current.generation
        metageneration = 0 if current is None else current.metageneration
        for name, wanted, actual in (
            ("ifGenerationMatch", self.generation_match, generation),
            ("ifMetagenerationMatch", self.metageneration_match, metageneration),
        ):
            if wanted is not None and wanted != actual:
                raise GcsError(
                    412,
                    "conditionNotMet",
                    "At least one of the pre-conditions you specified did not hold:"
                    f" {name} (expected {wanted}, got {actual}).",
                )
        if (
            self.generation_not_match == generation
            or self.metageneration_not_match == metageneration
        ):
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


def bucket_resource(bucket: Bucket, base_url: str) -> dict[str, Any]:
    return {
        "location": "US-CENTRAL1",
        "locationType": "region",
        "storageClass": "STANDARD",
        "projectNumber": "0",
        **bucket.attributes,
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "selfLink": f"{base_url}/storage/v1/b/{bucket.name}",
        "metageneration": str(bucket.metageneration),
        "timeCreated": timestamp(bucket.created_us),
        "updated": timestamp(bucket.created_us),
        "etag": _base64(str(bucket.metageneration).encode()),
    }


def object_resource(stored: StoredObject, base_url: str) -> dict[str, Any]:
    path = f"b/{stored.bucket}/o/{quote(stored.name, safe='')}"
    resource: dict[str, Any] = {
        "storageClass": "STANDARD",
        **stored.attributes,
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
        "name": stored.name,
        "bucket": stored.bucket,
        "selfLink": f"{base_url}/storage/v1/{path}",
        "mediaLink": f"{base_url}/download/storage/v1/{path}"
        f"?generation={stored.generation}&alt=media",
        "generation": str(stored.generation),
        "metageneration": str(stored.metageneration),
        "contentType": stored.content_type,
        "size": str(stored.size_bytes),
        "crc32c": stored.digests.crc32c,
        "etag": stored.etag,
        "timeCreated": timestamp(stored.created_us),
        "updated": timestamp(stored.updated_us),
        "timeStorageClassUpdated": timestamp(stored.created_us),
    }
    if stored.digests.md5 is not None:
        resource["md5Hash"] = stored.digests.md5
    if stored.component_count is not None:
        resource["componentCount"] = stored.component_count
    return resource
