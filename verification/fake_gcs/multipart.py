"""The bodies of multipart uploads (``multipart/related``): a JSON part, then the media. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from fake_gcs.resources import GcsError
from fake_gcs.routes import json_object

_HEADER_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    attributes: dict[str, Any]
    content_type: str | None
    data: bytes


def upload_attributes(content_type: str, head: bytes) -> dict[str, Any]:
    """Return the JSON part at the start of an upload; ``head`` may end inside the media part."""
    return _first_part(_boundary_of(content_type), head)[0]


def parse_upload(content_type: str, body: bytes) -> MultipartUpload:
    """Return the JSON part and the media part of a body. GcsError 400 for any other body.

    The media extends to the last closing delimiter, so it may contain any bytes. Lines end in CRLF
    or LF (gcsfs), as the first delimiter line does.
    """
    boundary = _boundary_of(content_type)
    attributes, start, newline = _first_part(boundary, body)
    end = body.rfind(newline + b"--" + boundary.encode() + b"--")
    head = _HEADER_END.search(body, start)
    if head is None or end < head.end():
        raise GcsError(400, "invalid", "The multipart body has no media part.")
    lines = body[start : head.start()].lstrip()
    headers = BytesParser(policy=HTTP).parsebytes(lines, headersonly=True)
    return MultipartUpload(attributes, headers.get("Content-Type"), body[head.end() : end])


def _boundary_of(content_type: str) -> str:
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise GcsError(400, "invalid", "The Content-Type has no multipart boundary.")
    return boundary


def _first_part(boundary: str, body: bytes) -> tuple[dict[str, Any], int, bytes]:
    """Return the JSON part, the end of the next delimiter, and the line end of the body."""
    delimiter = b"--" + boundary.encode()
    start = body.find(delimiter) + len(delimiter)
    newline = b"\r\n" if body[start : start + 2] == b"\r\n" else b"\n"
    head = _HEADER_END.search(body, start)
    end = -1 if head is None else body.find(newline + delimiter + newline, head.end())
    if head is None or end < 0:
        raise GcsError(400, "invalid", "The multipart body has no JSON part.")
    return json_object(body[head.end() : end]), end + len(newline) + len(delimiter), newline
