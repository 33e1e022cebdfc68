"""Multipart bodies: uploads (``multipart/related``) and batches (``multipart/mixed``). Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from fake_gcs.resources import GcsError
from fake_gcs.rest.routes import ApiReply, json_object

_HEADER_END = re.compile(rb"\r?\n\r?\n")
_STATUS_TEXT = {200: "OK", 204: "No Content", 304: "Not Modified", 404: "Not Found"}


@dataclass(frozen=True, slots=True)
class MultipartUpload:
    attributes: dict[str, Any]
    content_type: str | None
    data: bytes


def boundary_of(content_type: str) -> str:
    """Return the boundary parameter. GcsError 400 without one."""
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str) or not 1 <= len(boundary) <= 200:
        raise GcsError(400, "invalid", "The Content-Type has no multipart boundary.")
    return boundary


def upload_attributes(content_type: str, head: bytes) -> dict[str, Any]:
    """Return the JSON part at the start of an upload; ``head`` may end inside the media part."""
    return _first_part(boundary_of(content_type), head)[0]


def parse_upload(content_type: str, body: bytes) -> MultipartUpload:
    """Return the JSON part and the media part of a body. GcsError 400 for any other body.

    The media extends to the last closing delimiter, so it may contain any bytes. Lines end in CRLF
    (google-cloud-storage) or LF (gcsfs), as the first delimiter line does.
    """
    boundary = boundary_of(content_type)
    attributes, start, newline = _first_part(boundary, body)
    end = body.rfind(newline + b"--" + boundary.encode() + b"--")
    head = _HEADER_END.search(body, start)
    if head is None or end < head.end():
        raise GcsError(400, "invalid", "The multipart body has no media part.")
    lines = body[start : head.start()].lstrip()
    headers = BytesParser(policy=HTTP).parsebytes(lines, headersonly=True)
    return MultipartUpload(attributes, headers.get("Content-Type"), body[head.end() : end])


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


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One request of a batch: its own request line, headers (lower-case) and body."""

    content_id: str
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def parse_batch(content_type: str, body: bytes, limit: int) -> list[BatchPart]:
    """Return the requests of a batch. GcsError 400 when it is malformed or over ``limit`` parts."""
    boundary_of(content_type)
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = BytesParser().parsebytes(head + body)
    parts = message.get_payload() if message.is_multipart() else []
    if not isinstance(parts, list) or not 1 <= len(parts) <= limit:
        raise GcsError(400, "invalid", f"A batch has 1 to {limit} parts.")
    return [_batch_part(part) for part in parts if isinstance(part, Message)]


def _batch_part(part: Message) -> BatchPart:
    payload = part.get_payload(decode=True)
    text = payload if isinstance(payload, bytes) else b""
    line, _, rest = text.lstrip().partition(b"\n")
    words = line.decode("latin-1").split()
    if len(words) not in (2, 3):
        raise GcsError(400, "invalid", "A part of the batch has no request line.")
    inner = BytesParser().parsebytes(rest)
    content = inner.get_payload(decode=True)
    return BatchPart(
        content_id=part.get("Content-ID", ""),
        method=words[0],
        target=re.sub(r"^https?://[^/]*", "", words[1]),
        headers={key.lower(): str(value) for key, value in inner.items()},
        body=content.strip() if isinstance(content, bytes) else b"",
    )


def batch_reply(parts: Sequence[tuple[BatchPart, ApiReply]]) -> ApiReply:
    boundary = f"batch_{secrets.token_hex(12)}"
    out = bytearray()
    for part, reply in parts:
        content_id = part.content_id.replace("<", "<response-", 1)
        status = f"{reply.status} {_STATUS_TEXT.get(reply.status, 'Status')}"
        headers = "".join(f"{key}: {value}\r\n" for key, value in reply.headers.items())
        out += (
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {content_id}\r\n\r\n"
            f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(reply.body)}\r\n\r\n"
        ).encode()
        out += reply.body
        out += b"\r\n"
    out += f"--{boundary}--\r\n".encode()
    return ApiReply(200, {"Content-Type": f"multipart/mixed; boundary={boundary}"}, bytes(out))
