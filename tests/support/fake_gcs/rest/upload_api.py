"""The requests of uploads: media, multipart, resumable."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fake_gcs.resources import (
    GcsError,
    Preconditions,
    StoredObject,
    object_resource,
    whole_number,
)
from fake_gcs.rest.multipart import parse_upload
from fake_gcs.rest.routes import ApiReply, ApiRequest, Route
from fake_gcs.store import GcsStore, check_object_name
from fake_gcs.uploads import Uploads, check_digest_header

# GCS's status for "cancelled by the client".
CANCELLED = 499


def insert(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    """Store an upload of one request, media or multipart; an empty body is an empty object."""
    kind = request.query.get("uploadType")
    content_type = request.headers.get("content-type")
    if kind == "media":
        attributes: dict[str, Any] = {}
        data = request.body
    elif kind == "multipart":
        upload = parse_upload(content_type or "", request.body)
        attributes, data, content_type = upload.attributes, upload.data, upload.content_type
    else:
        raise GcsError(400, "invalid", f"Invalid uploadType: {str(kind)[:40]}.")
    _check_digests(attributes, request.headers.get("x-goog-hash"), data)
    stored = store.put(
        route.bucket,
        _name(request, attributes),
        data,
        _with_type(attributes, content_type),
        Preconditions.from_query(request.query),
    )
    return _stored_reply(stored, request)


def start(uploads: Uploads, route: Route, request: ApiRequest) -> ApiReply:
    attributes = request.json()
    name = _name(request, attributes)
    check_object_name(name)
    upload_id = uploads.start(
        route.bucket,
        name,
        _with_type(attributes, request.headers.get("x-upload-content-type")),
        Preconditions.from_query(request.query),
        whole_number(request.headers, "x-upload-content-length"),
    )
    location = (
        f"{request.base_url}/upload/storage/v1/b/{quote(route.bucket, safe='')}/o"
        f"?uploadType=resumable&name={quote(name, safe='')}&upload_id={upload_id}"
    )
    return ApiReply(200, {"Location": location, "X-GUploader-UploadID": upload_id})


def chunk(uploads: Uploads, _route: Route, request: ApiRequest) -> ApiReply:
    upload_id = request.query["upload_id"]
    stored = uploads.receive(
        upload_id,
        request.headers.get("content-range"),
        request.body,
        request.headers.get("x-goog-hash"),
    )
    if stored is not None:
        return _stored_reply(stored, request)
    received = len(uploads.session(upload_id).received)
    headers = {"X-GUploader-UploadID": upload_id}
    if received:
        headers["Range"] = f"bytes=0-{received - 1}"
    return ApiReply(308, headers)


def cancel(uploads: Uploads, _route: Route, request: ApiRequest) -> ApiReply:
    uploads.cancel(request.query.get("upload_id", ""))
    return ApiReply(CANCELLED)


def _stored_reply(stored: StoredObject, request: ApiRequest) -> ApiReply:
    reply = ApiReply.json(object_resource(stored, request.base_url))
    headers = {**reply.headers, "ETag": stored.etag, "x-goog-generation": str(stored.generation)}
    return ApiReply(reply.status, headers, reply.body)


def _name(request: ApiRequest, attributes: dict[str, Any]) -> str:
    name = request.query.get("name") or attributes.get("name")
    if not isinstance(name, str):
        raise GcsError(400, "required", "An upload needs the object's name.")
    return name


def _with_type(attributes: dict[str, Any], content_type: str | None) -> dict[str, Any]:
    if content_type is None or "contentType" in attributes:
        return attributes
    return {**attributes, "contentType": content_type}


def _check_digests(attributes: dict[str, Any], header: str | None, data: bytes) -> None:
    """Compare the bytes with the client's digests in the metadata or in ``x-goog-hash``."""
    claims = [f"{kind}={attributes[key]}" for kind, key in _DIGEST_FIELDS if key in attributes]
    if header is not None:
        claims.append(header)
    if claims:
        check_digest_header(",".join(claims), data)


_DIGEST_FIELDS = (("crc32c", "crc32c"), ("md5", "md5Hash"))
