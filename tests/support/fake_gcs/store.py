"""Buckets and objects in memory, with GCS's consistency rules. Pure, except for the given clock.

Not thread-safe; on one thread every method is atomic, since none yields. Generations rise strictly
over the whole store. Only live objects exist: no versioning, no soft delete, no folders.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fake_gcs.listing import ListQuery, Page, list_page
from fake_gcs.resources import (
    SERVER_BUCKET_FIELDS,
    WRITABLE_OBJECT_FIELDS,
    Bucket,
    Digests,
    GcsError,
    Limits,
    Preconditions,
    StoredObject,
)

_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_NO_CONDITIONS = Preconditions()


@dataclass(slots=True)
class _Shelf:
    """One bucket: its objects by name, and the names in order for listing."""

    bucket: Bucket
    objects: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])
    names: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class ComposeSource:
    name: str
    generation: int | None = None
    generation_match: int | None = None


class GcsStore:
    """The state of a fake GCS.

    Every method raises GcsError with GCS's status: 404 when a name is missing, 409 when it exists,
    412 and 304 for preconditions, 413 and 507 for the server's own limits.
    """

    def __init__(self, now_us: Callable[[], int], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._now_us = now_us
        self._shelves: dict[str, _Shelf] = {}
        self._last_generation = 0
        self._object_count = 0
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    # Buckets

    def create_bucket(self, name: str, attributes: Mapping[str, Any]) -> Bucket:
        if not _BUCKET_NAME.fullmatch(name):
            raise GcsError(400, "invalid", f"Invalid bucket name: '{name[:80]}'.")
        if name in self._shelves:
            raise GcsError(409, "conflict", f"Your previous request to create {name} succeeded.")
        if len(self._shelves) >= self.limits.buckets:
            raise GcsError(507, "limit", f"The fake holds {self.limits.buckets} buckets at most.")
        bucket = Bucket(name, self._now_us(), 1, _settable(attributes))
        self._shelves[name] = _Shelf(bucket)
        return bucket

    def bucket(self, name: str) -> Bucket:
        return self._shelf(name).bucket

    def buckets(self) -> list[Bucket]:
        return [self._shelves[name].bucket for name in sorted(self._shelves)]

    def patch_bucket(self, name: str, attributes: Mapping[str, Any]) -> Bucket:
        shelf = self._shelf(name)
        merged = _merge(shelf.bucket.attributes, _settable(attributes))
        shelf.bucket = replace(
            shelf.bucket, attributes=merged, metageneration=shelf.bucket.metageneration + 1
        )
        return shelf.bucket

    def delete_bucket(self, name: str) -> None:
        if self._shelf(name).objects:
            raise GcsError(409, "conflict", "The bucket you tried to delete is not empty.")
        del self._shelves[name]

    # Objects: reading

    def find(self, bucket: str, name: str) -> StoredObject | None:
        """Return the live object, or None. GcsError 404 when the bucket is missing."""
        return self._shelf(bucket).objects.get(name)

    def get(
        self,
        bucket: str,
        name: str,
        generation: int | None = None,
        conditions: Preconditions = _NO_CONDITIONS,
    ) -> StoredObject:
        stored = self.find(bucket, name)
        if stored is None or generation not in (None, stored.generation):
            raise GcsError(404, "notFound", f"No such object: {bucket}/{name}")
        conditions.check(stored)
        return stored

    def list_objects(self, bucket: str, query: ListQuery) -> tuple[list[StoredObject], Page]:
        shelf = self._shelf(bucket)
        page = list_page(shelf.names, query)
        return [shelf.objects[name] for name in page.names], page

    # Objects: writing

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        attributes: Mapping[str, Any],
        conditions: Preconditions = _NO_CONDITIONS,
        *,
        digests: Digests | None = None,
        component_count: int | None = None,
    ) -> StoredObject:
        """Make ``data`` the live object, as a new generation, if ``conditions`` hold."""
        check_object_name(name)
        current = self.find(bucket, name)
        conditions.check(current)
        self._check_room(name, data, current)
        now_us = self._now_us()
        stored = StoredObject(
            bucket=bucket,
            name=name,
            data=data,
            size_bytes=len(data),
            digests=digests or Digests.of(data),
            generation=self._next_generation(now_us),
            metageneration=1,
            created_us=now_us,
            updated_us=now_us,
            attributes=writable_fields(attributes),
            component_count=component_count,
        )
        self._place(stored)
        return stored

    def patch(
        self,
        bucket: str,
        name: str,
        attributes: Mapping[str, Any],
        generation: int | None = None,
        conditions: Preconditions = _NO_CONDITIONS,
        *,
        replace_all: bool = False,
    ) -> StoredObject:
        """Merge ``attributes`` (None removes one), or with ``replace_all`` replace all."""
        stored = self.get(bucket, name, generation, conditions)
        base: Mapping[str, Any] = {} if replace_all else stored.attributes
        changed = replace(
            stored,
            attributes=_merge(base, writable_fields(attributes)),
            metageneration=stored.metageneration + 1,
            updated_us=self._now_us(),
        )
        self._shelf(bucket).objects[name] = changed
        return changed

    def delete(
        self,
        bucket: str,
        name: str,
        generation: int | None = None,
        conditions: Preconditions = _NO_CONDITIONS,
    ) -> None:
        stored = self.get(bucket, name, generation, conditions)
        shelf = self._shelf(bucket)
        del shelf.objects[name]
        del shelf.names[bisect_left(shelf.names, name)]
        self._object_count -= 1
        self._total_bytes -= len(stored.data)

    def copy(
        self,
        source: StoredObject,
        bucket: str,
        name: str,
        attributes: Mapping[str, Any],
        conditions: Preconditions = _NO_CONDITIONS,
    ) -> StoredObject:
        """Store ``source`` under another name, with its attributes if ``attributes`` is empty."""
        return self.put(
            bucket,
            name,
            source.data,
            writable_fields(attributes) or source.attributes,
            conditions,
            digests=source.digests,
            component_count=source.component_count,
        )

    def move(
        self, source: StoredObject, name: str, conditions: Preconditions = _NO_CONDITIONS
    ) -> StoredObject:
        """Rename within the bucket, atomically; replaces an existing object of that name."""
        if source.name == name:
            raise GcsError(400, "invalid", "Source and destination of a move are the same.")
        moved = self.copy(source, source.bucket, name, {}, conditions)
        self.delete(source.bucket, source.name)
        return moved

    def compose(
        self,
        bucket: str,
        name: str,
        sources: Sequence[ComposeSource],
        attributes: Mapping[str, Any],
        conditions: Preconditions = _NO_CONDITIONS,
    ) -> StoredObject:
        if not 1 <= len(sources) <= self.limits.compose_sources:
            raise GcsError(
                400,
                "invalid",
                f"Compose takes 1 to {self.limits.compose_sources} sources, got {len(sources)}.",
            )
        parts = [
            self.get(
                bucket,
                source.name,
                source.generation,
                Preconditions(generation_match=source.generation_match),
            )
            for source in sources
        ]
        data = b"".join(part.data for part in parts)
        return self.put(
            bucket,
            name,
            data,
            attributes,
            conditions,
            digests=Digests.of(data, with_md5=False),
            component_count=sum(part.component_count or 1 for part in parts),
        )

    def _shelf(self, bucket: str) -> _Shelf:
        shelf = self._shelves.get(bucket)
        if shelf is None:
            raise GcsError(404, "notFound", f"The specified bucket does not exist: {bucket}.")
        return shelf

    def _next_generation(self, now_us: int) -> int:
        self._last_generation = max(self._last_generation + 1, now_us)
        return self._last_generation

    def _check_room(self, name: str, data: bytes, current: StoredObject | None) -> None:
        freed = 0 if current is None else len(current.data)
        if len(data) > self.limits.object_bytes:
            raise GcsError(
                413,
                "uploadTooLarge",
                f"{name}: {len(data)} bytes, the fake takes {self.limits.object_bytes} at most.",
            )
        if self._total_bytes - freed + len(data) > self.limits.total_bytes:
            raise GcsError(507, "limit", f"The fake holds {self.limits.total_bytes} bytes at most.")
        if current is None and self._object_count >= self.limits.objects:
            raise GcsError(507, "limit", f"The fake holds {self.limits.objects} objects at most.")

    def _place(self, stored: StoredObject) -> None:
        shelf = self._shelf(stored.bucket)
        current = shelf.objects.get(stored.name)
        if current is None:
            insort(shelf.names, stored.name)
            self._object_count += 1
        else:
            self._total_bytes -= len(current.data)
        self._total_bytes += len(stored.data)
        shelf.objects[stored.name] = stored


def check_object_name(name: str) -> None:
    """Raise GcsError 400 for a name that GCS refuses."""
    size_bytes = len(name.encode())
    if not 1 <= size_bytes <= 1024:
        raise GcsError(400, "invalid", f"An object name has 1 to 1024 bytes, got {size_bytes}.")
    if name in (".", "..") or "\r" in name or "\n" in name:
        raise GcsError(400, "invalid", f"Disallowed object name: {name!r}.")


def writable_fields(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: attributes[key] for key in WRITABLE_OBJECT_FIELDS & attributes.keys()}


def _settable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key not in SERVER_BUCKET_FIELDS}


def _merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396): None removes, a mapping merges, other values replace."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            old = merged.get(key)
            merged[key] = _merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged
