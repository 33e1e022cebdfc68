"""Requests and replies as values, and the operation of each raw path. Pure.

Paths are split before they are decoded, so that an object's name may contain ``%2F``, spaces, plus
signs and leading slashes: in the JSON API each name is one segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from fake_gcs.resources import GcsError


@dataclass(frozen=True, slots=True)
class Route:
    """The operation and objects of a request. ``to_*``: destination of a rewrite."""

    operation: str
    bucket: str
    name: str = ""
    to_bucket: str = ""
    to_name: str = ""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request. ``path`` is raw (percent-encoded), ``headers`` has lower-case names."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    base_url: str

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object, empty without a body. GcsError 400."""
        return json_object(self.body)


@dataclass(frozen=True, slots=True)
class ApiReply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | memoryview = b""

    @classmethod
    def json(cls, value: object, status: int = 200) -> ApiReply:
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        return cls(status, headers, msgspec.json.encode(value))

    @classmethod
    def refusal(cls, error: GcsError) -> ApiReply:
        return cls(304) if error.status == 304 else cls.json(error.resource(), error.status)


def json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise GcsError(400, "parseError", f"The body is not a JSON object: {error}") from error


def split_target(raw_target: str) -> tuple[str, dict[str, str]]:
    """Return the raw path and decoded query of ``/path?query``; the last of equal names counts."""
    path, _, query = raw_target.partition("?")
    return path, dict(parse_qsl(query, keep_blank_values=True))


_BUCKET = "/storage/v1/b/{bucket}"
_OBJECT = _BUCKET + "/o/{name}"
_ROUTES = [
    (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", template)), operations)
    for template, operations in (
        (_BUCKET, {"GET": "buckets.get"}),
        (_BUCKET + "/storageLayout", {"GET": "buckets.layout"}),
        (_BUCKET + "/o", {"GET": "objects.list"}),
        (_BUCKET + "/folders", {"GET": "folders.list", "POST": "folders.insert"}),
        (_BUCKET + "/folders/{name}", {"GET": "folders.get", "DELETE": "folders.delete"}),
        (_OBJECT, {"GET": "objects.get", "DELETE": "objects.delete"}),
        (_OBJECT + "/rewriteTo/b/{to_bucket}/o/{to_name}", {"POST": "objects.rewrite"}),
        ("/upload" + _BUCKET + "/o", {"POST": "objects.insert", "PUT": "objects.insert"}),
        ("/download" + _OBJECT, {"GET": "objects.media"}),
    )
]


def find_route(method: str, raw_path: str, query: Mapping[str, str]) -> Route:
    """Return the route. GcsError 404: an unknown path or method."""
    for pattern, operations in _ROUTES:
        match = pattern.fullmatch(raw_path)
        if match is not None and method in operations:
            names = {key: unquote(value) for key, value in match.groupdict().items()}
            return Route(_refine(operations[method], query), **names)
    raise GcsError(404, "notFound", f"The fake server does not know {method} of this address.")


def _refine(operation: str, query: Mapping[str, str]) -> str:
    """Return the operation, which at some addresses depends on the query."""
    if operation == "objects.get" and query.get("alt") == "media":
        return "objects.media"
    if operation == "objects.insert" and "upload_id" in query:
        return "uploads.chunk"
    if operation == "objects.insert" and query.get("uploadType") == "resumable":
        return "uploads.start"
    return operation
