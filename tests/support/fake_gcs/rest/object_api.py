"""The requests about objects, except uploads."""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import Any

from fake_gcs.listing import ListQuery
from fake_gcs.resources import (
    GcsError,
    Preconditions,
    StoredObject,
    object_resource,
    whole_number,
)
from fake_gcs.rest.routes import ApiReply, ApiRequest, Route
from fake_gcs.store import ComposeSource, GcsStore

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_REWRITE_TOKEN = re.compile(r"(\d{1,19})-(\d{1,18})")


def list_objects(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    found, page = store.list_objects(route.bucket, ListQuery.from_query(request.query))
    reply: dict[str, object] = {"kind": "storage#objects"}
    # Like GCS, without keys for empty lists.
    if found:
        reply["items"] = [object_resource(stored, request.base_url) for stored in found]
    if page.prefixes:
        reply["prefixes"] = page.prefixes
    if page.next_page_token is not None:
        reply["nextPageToken"] = page.next_page_token
    return ApiReply.json(reply)


def get(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    return ApiReply.json(object_resource(_read(store, route, request), request.base_url))


def media(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    """Return the bytes or one range of them; for several ranges, the whole object."""
    stored = _read(store, route, request)
    size = len(stored.data)
    headers = media_headers(stored)
    span = parse_range(request.headers.get("range", ""), size)
    if span is None:
        return ApiReply(200, headers, stored.data)
    first, end = span
    if first >= end:
        unsatisfiable = {"Content-Range": f"bytes */{size}", "Content-Type": "text/plain"}
        return ApiReply(416, unsatisfiable, b"Request range not satisfiable")
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
    return ApiReply(206, headers, memoryview(stored.data)[first:end])


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Return (first, end) of ``bytes=2-5``, ``bytes=2-``, ``bytes=-3``; empty if unsatisfiable.

    None, for the whole object, without a header or with one that HTTP requires to ignore.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


def media_headers(stored: StoredObject) -> dict[str, str]:
    hashes = f"crc32c={stored.digests.crc32c}"
    if stored.digests.md5 is not None:
        hashes += f",md5={stored.digests.md5}"
    headers = {
        "Content-Type": stored.content_type,
        "Accept-Ranges": "bytes",
        "ETag": f'"{stored.etag}"',
        "Last-Modified": formatdate(stored.updated_us / 1e6, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": str(stored.metageneration),
        "x-goog-hash": hashes,
        "x-goog-stored-content-encoding": str(stored.attributes.get("contentEncoding", "identity")),
        "x-goog-stored-content-length": str(len(stored.data)),
        "x-goog-storage-class": str(stored.attributes.get("storageClass", "STANDARD")),
    }
    for field, header in (
        ("cacheControl", "Cache-Control"),
        ("contentDisposition", "Content-Disposition"),
        ("contentEncoding", "Content-Encoding"),
        ("contentLanguage", "Content-Language"),
    ):
        if field in stored.attributes:
            headers[header] = str(stored.attributes[field])
    return headers


def delete(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    conditions = Preconditions.from_query(request.query)
    store.delete(route.bucket, route.name, whole_number(request.query, "generation"), conditions)
    return ApiReply(204)


def patch(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    return _change(store, route, request, replace_all=False)


def update(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    return _change(store, route, request, replace_all=True)


def _change(store: GcsStore, route: Route, request: ApiRequest, *, replace_all: bool) -> ApiReply:
    stored = store.patch(
        route.bucket,
        route.name,
        request.json(),
        whole_number(request.query, "generation"),
        Preconditions.from_query(request.query),
        replace_all=replace_all,
    )
    return ApiReply.json(object_resource(stored, request.base_url))


def compose(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    body = request.json()
    entries = body.get("sourceObjects")
    destination = body.get("destination") or {}
    if not isinstance(entries, list) or not isinstance(destination, dict):
        raise GcsError(400, "required", "Compose needs sourceObjects.")
    stored = store.compose(
        route.bucket,
        route.name,
        [_compose_source(entry) for entry in entries],
        destination,
        Preconditions.from_query(request.query),
    )
    return ApiReply.json(object_resource(stored, request.base_url))


def _compose_source(entry: object) -> ComposeSource:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise GcsError(400, "required", "Each of the sourceObjects needs a name.")
    conditions = entry.get("objectPreconditions") or {}
    numbers = {
        "generation": entry.get("generation"),
        "ifGenerationMatch": conditions.get("ifGenerationMatch"),
    }
    given = {key: str(value) for key, value in numbers.items() if value is not None}
    return ComposeSource(
        entry["name"], whole_number(given, "generation"), whole_number(given, "ifGenerationMatch")
    )


def copy(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    stored = _copy(store, route, request, _source(store, route, request))
    return ApiReply.json(object_resource(stored, request.base_url))


def rewrite(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    """Copy an object, in several calls with ``maxBytesRewrittenPerCall``.

    The token contains the source generation and the bytes done, so the server keeps no state
    between the calls.
    """
    source = _source(store, route, request)
    size = len(source.data)
    step = whole_number(request.query, "maxBytesRewrittenPerCall") or size
    done = min(_rewrite_done(request.query.get("rewriteToken"), source) + step, size)
    reply: dict[str, Any] = {
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": str(done),
        "objectSize": str(size),
        "done": done == size,
    }
    if done == size:
        stored = _copy(store, route, request, source)
        reply["resource"] = object_resource(stored, request.base_url)
    else:
        reply["rewriteToken"] = f"{source.generation}-{done}"
    return ApiReply.json(reply)


def _rewrite_done(token: str | None, source: StoredObject) -> int:
    if token is None:
        return 0
    match = _REWRITE_TOKEN.fullmatch(token)
    if match is None or int(match[1]) != source.generation:
        raise GcsError(400, "invalid", "The rewriteToken is not valid for this source.")
    return int(match[2])


def move(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    source = _source(store, route, request)
    stored = store.move(source, route.to_name, Preconditions.from_query(request.query))
    return ApiReply.json(object_resource(stored, request.base_url))


def _copy(store: GcsStore, route: Route, request: ApiRequest, source: StoredObject) -> StoredObject:
    return store.copy(
        source,
        route.to_bucket,
        route.to_name,
        request.json(),
        Preconditions.from_query(request.query),
    )


def _read(store: GcsStore, route: Route, request: ApiRequest) -> StoredObject:
    generation = whole_number(request.query, "generation")
    conditions = Preconditions.from_query(request.query)
    return store.get(route.bucket, route.name, generation, conditions)


def _source(store: GcsStore, route: Route, request: ApiRequest) -> StoredObject:
    generation = whole_number(request.query, "sourceGeneration")
    conditions = Preconditions.from_query(request.query, prefix="ifSource")
    return store.get(route.bucket, route.name, generation, conditions)
