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
    """The operation and objects of a request. ``to_*``: destination of a copy, rewrite or move."""

    operation: str
    bucket: str = ""
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
        if error.status == 304:
            return cls(304, error.headers)
        reply = cls.json(error.resource(), error.status)
        return cls(reply.status, {**reply.headers, **error.headers}, reply.body)


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


def _pattern(template: str) -> re.Pattern[str]:
    expression = re.sub(r"\{(\w+)\*\}", r"(?P<\1>.+)", template)
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", expression))


_OBJECT = "/storage/v1/b/{bucket}/o/{name}"
_ROUTES = [
    (_pattern(template), operations)
    for template, operations in (
        ("/storage/v1/b", {"GET": "buckets.list", "POST": "buckets.insert"}),
        (
            "/storage/v1/b/{bucket}",
            {"GET": "buckets.get", "DELETE": "buckets.delete", "PATCH": "buckets.patch"},
        ),
        ("/storage/v1/b/{bucket}/storageLayout", {"GET": "buckets.layout"}),
        ("/storage/v1/b/{bucket}/o", {"GET": "objects.list"}),
        (
            _OBJECT,
            {
                "GET": "objects.get",
                "DELETE": "objects.delete",
                "PATCH": "objects.patch",
                "PUT": "objects.update",
            },
        ),
        (_OBJECT + "/compose", {"POST": "objects.compose"}),
        (_OBJECT + "/copyTo/b/{to_bucket}/o/{to_name}", {"POST": "objects.copy"}),
        (_OBJECT + "/rewriteTo/b/{to_bucket}/o/{to_name}", {"POST": "objects.rewrite"}),
        (_OBJECT + "/moveTo/o/{to_name}", {"POST": "objects.move"}),
        (
            "/upload/storage/v1/b/{bucket}/o",
            {"POST": "objects.insert", "PUT": "objects.insert", "DELETE": "uploads.cancel"},
        ),
        ("/download/storage/v1/b/{bucket}/o/{name}", {"GET": "objects.media"}),
        ("/batch(?:/storage/v1)?", {"POST": "batch"}),
        # The XML API's address of an object, which is also its public URL.
        ("/{bucket}/{name*}", {"GET": "objects.media", "HEAD": "objects.media"}),
    )
]


def find_route(method: str, raw_path: str, query: Mapping[str, str]) -> Route:
    """Return the route. GcsError 404: unknown path, 405: wrong method, 400: invalid encoding."""
    for pattern, operations in _ROUTES:
        match = pattern.fullmatch(raw_path)
        if match is None:
            continue
        operation = operations.get(method)
        if operation is None:
            raise GcsError(405, "methodNotAllowed", f"{method} is not supported at this address.")
        try:
            names = {
                key: unquote(value, errors="strict") for key, value in match.groupdict().items()
            }
        except UnicodeDecodeError as error:
            raise GcsError(400, "invalid", "The path is not percent-encoded UTF-8.") from error
        return Route(_refine(operation, query), **names)
    raise GcsError(404, "notFound", "The fake server does not know this address.")


def _refine(operation: str, query: Mapping[str, str]) -> str:
    """Return the operation, which at some addresses depends on the query."""
    if operation == "objects.get" and query.get("alt") == "media":
        return "objects.media"
    if operation == "objects.insert" and "upload_id" in query:
        return "uploads.chunk"
    if operation == "objects.insert" and query.get("uploadType") == "resumable":
        return "uploads.start"
    return operation
