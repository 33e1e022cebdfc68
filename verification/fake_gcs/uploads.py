"""Resumable uploads: sessions, chunks, 308. Pure, except for random ids.

The protocol is Google's (https://cloud.google.com/storage/docs/performing-resumable-uploads): each
chunk has its position, the server replies with the bytes it has, and a finished session repeats its
answer. So a client may repeat a chunk whose reply was lost.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from fake_gcs.resources import GcsError, Preconditions, StoredObject
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
        return cls(
            None if first is None else int(first),
            -1 if last is None else int(last),
            None if total == "*" else int(total),
        )


@dataclass(slots=True)
class UploadSession:
    """One upload in progress. It ends with ``stored`` or with ``error``."""

    bucket: str
    name: str
    content_type: str | None
    conditions: Preconditions
    received: bytearray = field(default_factory=bytearray)
    stored: StoredObject | None = None
    error: GcsError | None = None


class Uploads:
    """The sessions of a server. Methods raise GcsError; an unknown session is 404."""

    def __init__(self, store: GcsStore) -> None:
        self._store = store
        self._sessions: dict[str, UploadSession] = {}

    def start(
        self, bucket: str, name: str, content_type: str | None, conditions: Preconditions
    ) -> str:
        """Open a session and return its id. The conditions must hold now and at the end."""
        conditions.check(self._store.find(bucket, name))
        upload_id = secrets.token_urlsafe(24)
        self._sessions[upload_id] = UploadSession(bucket, name, content_type, conditions)
        return upload_id

    def session(self, upload_id: str) -> UploadSession:
        session = self._sessions.get(upload_id)
        if session is None:
            raise GcsError(404, "notFound", "No such upload session.")
        return session

    def receive(self, upload_id: str, content_range: str, data: bytes) -> StoredObject | None:
        """Take one chunk or a status query. Return the object when complete, else None.

        Repeated bytes are ignored; a chunk that starts beyond the received ones changes nothing.
        """
        session = self.session(upload_id)
        if session.error is not None:
            raise session.error
        if session.stored is not None:
            return session.stored
        place = ContentRange.parse(content_range)
        self._append(session, place, data)
        if place.total is None or len(session.received) != place.total:
            return None
        try:
            session.stored = self._store.put(
                session.bucket,
                session.name,
                bytes(session.received),
                session.conditions,
                content_type=session.content_type,
            )
        except GcsError as error:
            session.error = error
            raise
        return session.stored

    def _append(self, session: UploadSession, place: ContentRange, data: bytes) -> None:
        if place.first is None:
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
        if end != place.total:
            end -= end % CHUNK_BYTES
        session.received += memoryview(data)[have - place.first : max(end - place.first, 0)]
