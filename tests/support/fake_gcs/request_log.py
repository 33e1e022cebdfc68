"""The log of the server's requests: one record each, in memory, up to a limit. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import islice

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
      index: position in the order in which requests ended, from 0, never reused.
      time_s: Unix time of its beginning.
      seconds: its duration, faults included.
      method, path: as sent; the path is decoded and has its query.
      operation: ``objects.media``, ``objects.insert``, ... (``routes.py``), ``unknown``.
      target: ``bucket/object``; ``bucket/`` for requests about a bucket.
      status: HTTP status that was sent, or None when no reply began.
      bytes_in: bytes of the request's body that were read.
      bytes_out: bytes of the reply's body that were written to the connection.
      range_header: the request's ``Range`` or ``Content-Range``.
      client: address and port of the client's end of the connection.
      user_agent: the client's ``User-Agent``.
      fault: kind of the fault that hit it, or None.
    """

    index: int
    time_s: float
    seconds: float
    method: str
    path: str
    operation: str
    target: str
    status: int | None
    bytes_in: int
    bytes_out: int
    range_header: str
    client: str
    user_agent: str
    fault: str | None


class RequestLog:
    """The newest ``limit`` records."""

    def __init__(self, limit: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=limit)
        self._next_index = 0

    def append(self, record: RequestRecord) -> None:
        """Store the record under the next index; its own index is ignored."""
        self._records.append(msgspec.structs.replace(record, index=self._next_index))
        self._next_index += 1

    def clear(self) -> None:
        self._records.clear()

    def page(self, since: int, count: int) -> list[RequestRecord]:
        """Return up to ``count`` records with ``index >= since``, in order."""
        if not self._records:
            return []
        start = max(since - self._records[0].index, 0)
        return list(islice(self._records, start, start + count))


def bytes_served(
    records: Iterable[RequestRecord], *, operation: str = "objects.media", target: str = "*"
) -> int:
    """Return the body bytes that the server sent for these requests; by default object data."""
    return sum(
        record.bytes_out
        for record in records
        if fnmatchcase(record.operation, operation) and fnmatchcase(record.target, target)
    )


def bytes_received(
    records: Iterable[RequestRecord], *, operation: str = "*", target: str = "*"
) -> int:
    """Return the body bytes that the server received for these requests, framing included."""
    return sum(
        record.bytes_in
        for record in records
        if fnmatchcase(record.operation, operation) and fnmatchcase(record.target, target)
    )


def round_trips(records: Iterable[RequestRecord]) -> int:
    """Return the most requests of which each began after the one before had ended."""
    count, end_s = 0, 0.0
    for record in sorted(records, key=lambda each: each.time_s + each.seconds):
        if record.time_s >= end_s:
            count, end_s = count + 1, record.time_s + record.seconds
    return count
