"""Resumable uploads: sessions, chunks, 308. Pure, except for random ids.

The protocol is Google's (https://cloud.google.com/storage/docs/performing-resumable-uploads): each
chunk has its position, the server replies with the bytes it has, and a finished session repeats its
answer. So a client may repeat a chunk whose reply was lost.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fake_gcs.resources import Digests, GcsError, Preconditions, StoredObject
from fake_gcs.store import GcsStore

CHUNK_BYTES = 256 * 1024  # of a chunk that is not the last, whole multiples of this count
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


@dataclass(frozen=True, slots=True)
class ContentRange:
    """``bytes first-last/total``; ``first`` is None for ``*``, ``total`` None when unknown."""

    first: int | None
    last: int
    total: int | None

    @classmethod
    def parse(cls, header: str) -> ContentRange:
        match = _RANGE.fullmatch(header.strip())
        if match is None:
            raise GcsError(400, "invalid", f"Failed to parse Content-Range header: {header[:80]}")
        first, last, total = match.groups()
        if (first, last, total) == ("0", "0", "0"):
            return cls(None, -1, 0)  # google-cloud-storage's range of no bytes
        return cls(
            None if first is None else int(first),
            -1 if last is None else int(last),
            None if total == "*" else int(total),
        )


@dataclass(slots=True)
class UploadSession:
    """One upload in progress. It ends with ``stored`` (without data) or with ``error``."""

    bucket: str
    name: str
    attributes: Mapping[str, Any]
    conditions: Preconditions
    total: int | None
    received: bytearray = field(default_factory=bytearray)
    stored: StoredObject | None = None
    error: GcsError | None = None


class Uploads:
    """The sessions of a server. Methods raise GcsError; an unknown session is 404."""

    def __init__(self, store: GcsStore) -> None:
        self._store = store
        self._sessions: dict[str, UploadSession] = {}
        self._received_bytes = 0  # of all sessions together

    def start(
        self,
        bucket: str,
        name: str,
        attributes: Mapping[str, Any],
        conditions: Preconditions,
        total: int | None,
    ) -> str:
        """Open a session and return its id. The conditions must hold now and at the end."""
        conditions.check(self._store.find(bucket, name))
        if total is not None and total > self._store.limits.object_bytes:
            raise GcsError(413, "uploadTooLarge", f"{name}: {total} bytes are too many.")
        if len(self._sessions) >= self._store.limits.uploads:
            self._forget_a_finished_one()
        upload_id = secrets.token_urlsafe(24)
        self._sessions[upload_id] = UploadSession(bucket, name, attributes, conditions, total)
        return upload_id

    def session(self, upload_id: str) -> UploadSession:
        session = self._sessions.get(upload_id)
        if session is None:
            raise GcsError(404, "notFound", "No such upload session.")
        return session

    def cancel(self, upload_id: str) -> None:
        self._received_bytes -= len(self.session(upload_id).received)
        del self._sessions[upload_id]

    def receive(
        self, upload_id: str, content_range: str | None, data: bytes, digest_header: str | None
    ) -> StoredObject | None:
        """Take one chunk or a status query. Return the object when complete, else None.

        Repeated bytes are ignored; a chunk that starts beyond the received ones changes nothing. A
        session that had already finished returns an object without data. ``digest_header`` is the
        client's ``x-goog-hash`` of the whole object, sent with the last chunk.
        """
        session = self.session(upload_id)
        if session.error is not None:
            raise session.error
        if session.stored is not None:
            return session.stored
        place = (
            ContentRange(0, len(data) - 1, len(data))
            if content_range is None
            else ContentRange.parse(content_range)
        )
        _check_total(session, place)
        self._append(session, place, data)
        if session.total is None or len(session.received) != session.total:
            return None
        return self._finish(session, digest_header)

    def _append(self, session: UploadSession, place: ContentRange, data: bytes) -> None:
        if place.first is None:
            if data:
                raise GcsError(400, "invalid", "A status query has no body.")
            return
        if place.last - place.first + 1 != len(data):
            raise GcsError(
                400,
                "invalid",
                f"Content-Range says {place.last - place.first + 1} bytes, got {len(data)}.",
            )
        have = len(session.received)
        end = place.first + len(data)
        if place.first > have or end <= have:
            return
        if end > self._store.limits.object_bytes:
            raise GcsError(413, "uploadTooLarge", f"{session.name}: {end} bytes are too many.")
        if end != session.total:
            end -= end % CHUNK_BYTES
        news = memoryview(data)[have - place.first : max(end - place.first, 0)]
        limit = self._store.limits.total_bytes
        if self._store.total_bytes + self._received_bytes + len(news) > limit:
            raise GcsError(507, "limit", f"The fake holds {limit} bytes at most.")
        self._received_bytes += len(news)
        session.received += news

    def _finish(self, session: UploadSession, digest_header: str | None) -> StoredObject:
        data = bytes(session.received)
        session.received = bytearray()
        self._received_bytes -= len(data)
        try:
            if digest_header is not None:
                check_digest_header(digest_header, data)
            stored = self._store.put(
                session.bucket, session.name, data, session.attributes, session.conditions
            )
        except GcsError as error:
            session.error = error
            raise
        session.stored = replace(stored, data=b"")
        return stored

    def _forget_a_finished_one(self) -> None:
        for upload_id, session in self._sessions.items():
            if session.stored is not None or session.error is not None:
                del self._sessions[upload_id]
                return
        raise GcsError(
            507, "limit", f"The fake holds {self._store.limits.uploads} open uploads at most."
        )


def _check_total(session: UploadSession, place: ContentRange) -> None:
    if place.total is None:
        return
    if session.total is not None and session.total != place.total:
        raise GcsError(
            400, "invalid", f"Total size changed (expected {session.total}, got {place.total})."
        )
    if place.first is not None and place.last >= place.total:
        raise GcsError(400, "invalid", "The chunk ends past the total size.")
    session.total = place.total


def check_digest_header(header: str, data: bytes) -> None:
    """Check ``x-goog-hash: crc32c=...,md5=...``. GcsError 400 when the bytes differ."""
    digests = Digests.of(data)
    actual = {"crc32c": digests.crc32c, "md5": digests.md5}
    for item in header.split(","):
        kind, _, value = item.strip().partition("=")
        if kind in actual and value != actual[kind]:
            raise GcsError(
                400,
                "invalid",
                f"Provided {kind} does not match the content"
                f" (expected {value[:40]}, got {actual[kind]}).",
            )
