"""Buckets and objects in memory, with GCS's consistency rules. Pure, except for the given clock.

Not thread-safe; on one thread every method is atomic, since none yields. Generations rise strictly
over the whole store. Only live objects exist: no versioning, no soft delete. A bucket whose name
begins with "hierarchical" has folders, which an object's upload makes and its deletion leaves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fake_gcs.listing import ListQuery, Page, list_page
from fake_gcs.resources import GcsError, Preconditions, StoredObject, crc32c_of

_NO_CONDITIONS = Preconditions()

HIERARCHICAL = "hierarchical"
"""The names of buckets with folders begin so."""


@dataclass(slots=True)
class _Shelf:
    """One bucket: its objects by name, and the names in order for listing.

    ``folders``: their names, which end with a slash; None where the bucket has none.
    """

    objects: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])
    names: list[str] = field(default_factory=list[str])
    folders: set[str] | None = None


class GcsStore:
    """The state of a fake GCS with these buckets.

    Every method raises GcsError with GCS's status: 404 when a name is missing, 412 and 304 for
    preconditions.
    """

    def __init__(self, now_us: Callable[[], int], buckets: Iterable[str]) -> None:
        self._now_us = now_us
        self._shelves = {
            name: _Shelf(folders=set() if name.startswith(HIERARCHICAL) else None)
            for name in buckets
        }
        self._last_generation = 0

    def find(self, bucket: str, name: str) -> StoredObject | None:
        """Return the live object, or None. GcsError 404 when the bucket is missing."""
        return self.shelf(bucket).objects.get(name)

    def get(
        self, bucket: str, name: str, conditions: Preconditions = _NO_CONDITIONS
    ) -> StoredObject:
        stored = self.find(bucket, name)
        if stored is None:
            raise GcsError(404, "notFound", f"No such object: {bucket}/{name}")
        conditions.check(stored)
        return stored

    def list_objects(self, bucket: str, query: ListQuery) -> tuple[list[StoredObject], Page]:
        shelf = self.shelf(bucket)
        names = shelf.names
        if query.with_folders:
            below = {name for name in shelf.folders or () if name != query.prefix}
            names = sorted(below.union(names))
        page = list_page(names, query)
        return [shelf.objects[name] for name in page.names], page

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        conditions: Preconditions = _NO_CONDITIONS,
        *,
        content_type: str | None = None,
    ) -> StoredObject:
        """Make ``data`` the live object, as a new generation, if ``conditions`` hold."""
        check_object_name(name)
        shelf = self.shelf(bucket)
        conditions.check(shelf.objects.get(name))
        now_us = self._now_us()
        self._last_generation = max(self._last_generation + 1, now_us)
        stored = StoredObject(
            bucket=bucket,
            name=name,
            data=data,
            crc32c=crc32c_of(data),
            generation=self._last_generation,
            created_us=now_us,
            content_type=str(content_type or "application/octet-stream"),
        )
        if name not in shelf.objects:
            insort(shelf.names, name)
        if shelf.folders is not None:
            shelf.folders |= folders_above(name)
        shelf.objects[name] = stored
        return stored

    def delete(self, bucket: str, name: str, conditions: Preconditions = _NO_CONDITIONS) -> None:
        self.get(bucket, name, conditions)
        shelf = self.shelf(bucket)
        del shelf.objects[name]
        del shelf.names[bisect_left(shelf.names, name)]

    def folders(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the folders whose names begin with ``prefix``, which end with a slash."""
        return sorted(name for name in self._folders(bucket) if name.startswith(prefix))

    def make_folder(self, bucket: str, name: str) -> None:
        """Make a folder, and those above it."""
        self._folders(bucket).update(folders_above(f"{name.rstrip('/')}/"))

    def delete_folder(self, bucket: str, name: str) -> None:
        """Delete a folder; GcsError 409 while anything is in it."""
        folders, name = self._folders(bucket), f"{name.rstrip('/')}/"
        if name not in folders:
            raise GcsError(404, "notFound", f"No such folder: {bucket}/{name}")
        inside = folders.union(self.shelf(bucket).names) - {name}
        if any(each.startswith(name) for each in inside):
            raise GcsError(409, "conflict", f"The folder is not empty: {bucket}/{name}")
        folders.remove(name)

    def _folders(self, bucket: str) -> set[str]:
        folders = self.shelf(bucket).folders
        if folders is None:
            raise GcsError(409, "conflict", f"The bucket has no hierarchical namespace: {bucket}.")
        return folders

    def shelf(self, bucket: str) -> _Shelf:
        """Return a bucket."""
        shelf = self._shelves.get(bucket)
        if shelf is None:
            raise GcsError(404, "notFound", f"The specified bucket does not exist: {bucket}.")
        return shelf


def folders_above(name: str) -> set[str]:
    """Return the folders that contain an object; a name that ends with a slash is one of them."""
    parts = name.split("/")[:-1]
    return {"/".join(parts[: end + 1]) + "/" for end in range(len(parts))}


def check_object_name(name: str) -> None:
    """Raise GcsError 400 for a name that GCS refuses."""
    size_bytes = len(name.encode())
    if not 1 <= size_bytes <= 1024:
        raise GcsError(400, "invalid", f"An object name has 1 to 1024 bytes, got {size_bytes}.")
    if name in (".", "..") or "\r" in name or "\n" in name:
        raise GcsError(400, "invalid", f"Disallowed object name: {name!r}.")
