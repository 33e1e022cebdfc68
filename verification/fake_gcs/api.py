"""The JSON API on a store: one request in, one reply out. Pure; does not block.

Each request is applied or refused as a whole, in one call, so preconditions are atomic. ``fields``,
``projection``, ``userProject`` and authorization are accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fake_gcs.listing import ListQuery
from fake_gcs.multipart import parse_upload
from fake_gcs.resources import (
    GcsError,
    Preconditions,
    StoredObject,
    bucket_resource,
    layout_resource,
    object_resource,
    whole_number,
)
from fake_gcs.routes import ApiReply, ApiRequest, Route, find_route
from fake_gcs.store import GcsStore, check_object_name
from fake_gcs.uploads import Uploads

REWRITE_BYTES = 400
"""Bytes of an object that the first call rewrites; another does the rest. GCS promises no size."""
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


class GcsApi:
    """Answers every request of the JSON API from one store."""

    def __init__(self, store: GcsStore) -> None:
        self._store = store
        self.uploads = Uploads(store)

    def handle(self, request: ApiRequest) -> ApiReply:
        """Return the reply to one request, also a refusal. No request makes it raise."""
        try:
            route = find_route(request.method, request.path, request.query)
            return getattr(self, "_" + route.operation.replace(".", "_"))(route, request)
        except GcsError as error:
            return ApiReply.refusal(error)

    # Of the control interface: many objects at once

    def objects_below(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Return the bytes of each object whose name begins with ``prefix``, in order."""
        objects = self._store.shelf(bucket).objects
        return {name: bytes(objects[name].data) for name in self._names(bucket, prefix)}

    def put_objects(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Store each in place of any object of its name."""
        for name, data in objects.items():
            self._store.put(bucket, name, data)

    def delete_below(self, bucket: str, prefix: str) -> None:
        for name in self._names(bucket, prefix):
            self._store.delete(bucket, name)

    def _names(self, bucket: str, prefix: str) -> list[str]:
        return [name for name in self._store.shelf(bucket).names if name.startswith(prefix)]

    # Buckets

    def _buckets_get(self, route: Route, _request: ApiRequest) -> ApiReply:
        self._store.shelf(route.bucket)
        return ApiReply.json(bucket_resource(route.bucket))

    def _buckets_layout(self, route: Route, _request: ApiRequest) -> ApiReply:
        self._store.shelf(route.bucket)
        return ApiReply.json(layout_resource(route.bucket))

    # Folders, of hierarchical buckets alone

    def _folders_list(self, route: Route, request: ApiRequest) -> ApiReply:
        names = self._store.folders(route.bucket, request.query.get("prefix", ""))
        return ApiReply.json({"items": [{"name": name} for name in names]})

    def _folders_get(self, route: Route, _request: ApiRequest) -> ApiReply:
        name = f"{route.name.rstrip('/')}/"
        if name not in self._store.folders(route.bucket, name):
            raise GcsError(404, "notFound", f"No such folder: {route.bucket}/{name}")
        return ApiReply.json({"name": name})

    def _folders_insert(self, route: Route, request: ApiRequest) -> ApiReply:
        name = str(request.json().get("name", ""))
        self._store.make_folder(route.bucket, name)
        return ApiReply.json({"name": name})

    def _folders_delete(self, route: Route, _request: ApiRequest) -> ApiReply:
        self._store.delete_folder(route.bucket, route.name)
        return ApiReply(204)

    # Objects

    def _objects_list(self, route: Route, request: ApiRequest) -> ApiReply:
        found, page = self._store.list_objects(route.bucket, ListQuery.from_query(request.query))
        reply: dict[str, object] = {"kind": "storage#objects"}
        # Like GCS, without keys for empty lists.
        if found:
            reply["items"] = [object_resource(stored, request.base_url) for stored in found]
        if page.prefixes:
            reply["prefixes"] = page.prefixes
        if page.next_page_token is not None:
            reply["nextPageToken"] = page.next_page_token
        return ApiReply.json(reply)

    def _objects_get(self, route: Route, request: ApiRequest) -> ApiReply:
        return ApiReply.json(object_resource(self._read(route, request), request.base_url))

    def _objects_media(self, route: Route, request: ApiRequest) -> ApiReply:
        """Return the bytes or one range of them."""
        stored = self._read(route, request)
        size = len(stored.data)
        headers = {
            "Content-Type": stored.content_type,
            "ETag": f'"{stored.etag}"',
            "x-goog-generation": str(stored.generation),
            "x-goog-hash": f"crc32c={stored.crc32c}",
            "x-goog-stored-content-encoding": "identity",
            "x-goog-stored-content-length": str(size),
        }
        span = parse_range(request.headers.get("range"), size)
        if span is None:
            return ApiReply(200, headers, stored.data)
        first, end = span
        if first >= end:
            return ApiReply(416, {"Content-Range": f"bytes */{size}"}, b"not satisfiable")
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        return ApiReply(206, headers, memoryview(stored.data)[first:end])

    def _objects_delete(self, route: Route, request: ApiRequest) -> ApiReply:
        self._store.delete(route.bucket, route.name, Preconditions.from_query(request.query))
        return ApiReply(204)

    def _objects_rewrite(self, route: Route, request: ApiRequest) -> ApiReply:
        """Copy an object; one above ``REWRITE_BYTES`` takes two calls.

        The token is the source's generation, so the server keeps no state between the calls.
        """
        conditions = Preconditions.from_query(request.query, prefix="ifSource")
        source = self._store.get(route.bucket, route.name, conditions)
        token = request.query.get("rewriteToken")
        if token not in (None, "", str(source.generation)):
            raise GcsError(400, "invalid", "The rewriteToken is not valid for this source.")
        size = len(source.data)
        done = size if token else min(REWRITE_BYTES, size)
        reply: dict[str, Any] = {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": str(done),
            "objectSize": str(size),
            "done": done == size,
        }
        if done < size:
            reply["rewriteToken"] = str(source.generation)
            return ApiReply.json(reply)
        stored = self._store.put(
            route.to_bucket,
            route.to_name,
            source.data,
            Preconditions.from_query(request.query),
            content_type=source.content_type,
        )
        return ApiReply.json({**reply, "resource": object_resource(stored, request.base_url)})

    def _read(self, route: Route, request: ApiRequest) -> StoredObject:
        stored = self._store.get(route.bucket, route.name, Preconditions.from_query(request.query))
        if whole_number(request.query, "generation") not in (None, stored.generation):
            raise GcsError(404, "notFound", f"No such generation: {route.bucket}/{route.name}")
        return stored

    # Uploads

    def _objects_insert(self, route: Route, request: ApiRequest) -> ApiReply:
        """Store an upload of one request, media or multipart; an empty body is an empty object."""
        kind = request.query.get("uploadType")
        content_type = request.headers.get("content-type")
        attributes: dict[str, Any] = {}
        data = request.body
        if kind == "multipart":
            upload = parse_upload(content_type or "", request.body)
            attributes, data, content_type = upload.attributes, upload.data, upload.content_type
        elif kind != "media":
            raise GcsError(400, "invalid", f"Invalid uploadType: {str(kind)[:40]}.")
        stored = self._store.put(
            route.bucket,
            _name(request, attributes),
            data,
            Preconditions.from_query(request.query),
            content_type=attributes.get("contentType", content_type),
        )
        return ApiReply.json(object_resource(stored, request.base_url))

    def _uploads_start(self, route: Route, request: ApiRequest) -> ApiReply:
        attributes = request.json()
        name = _name(request, attributes)
        check_object_name(name)
        upload_id = self.uploads.start(
            route.bucket,
            name,
            attributes.get("contentType"),
            Preconditions.from_query(request.query),
        )
        location = (
            f"{request.base_url}/upload/storage/v1/b/{quote(route.bucket, safe='')}/o"
            f"?uploadType=resumable&name={quote(name, safe='')}&upload_id={upload_id}"
        )
        return ApiReply(200, {"Location": location})

    def _uploads_chunk(self, _route: Route, request: ApiRequest) -> ApiReply:
        upload_id = request.query["upload_id"]
        content_range = request.headers.get("content-range", "")
        stored = self.uploads.receive(upload_id, content_range, request.body)
        if stored is not None:
            return ApiReply.json(object_resource(stored, request.base_url))
        received = len(self.uploads.session(upload_id).received)
        return ApiReply(308, {"Range": f"bytes=0-{received - 1}"} if received else {})


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return (first, end) of ``bytes=2-5`` or ``bytes=2-``; None without a header. GcsError 400."""
    if header is None:
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise GcsError(400, "invalid", f"The fake server does not support the range {header[:40]}.")
    first, last = match.groups()
    return int(first), min(int(last) + 1, size) if last else size


def _name(request: ApiRequest, attributes: dict[str, Any]) -> str:
    name = request.query.get("name") or attributes.get("name")
    if not isinstance(name, str):
        raise GcsError(400, "required", "An upload needs the object's name.")
    return name
