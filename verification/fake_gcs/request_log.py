"""The log of the server's requests: one record each, in memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
      time_s: Unix time of its beginning.
      seconds: its duration, faults included.
      method, path: as sent; the path is decoded and has its query.
      operation: ``objects.media``, ``objects.insert``, ... (``routes.py``), ``unknown``.
      target: ``bucket/object``; ``bucket/`` for requests about a bucket.
      status: HTTP status that was sent, or None when no reply began.
      bytes_in: bytes of the request's body that were read.
      bytes_out: bytes of the reply's body that were written to the connection.
      range_header: the request's ``Range`` or ``Content-Range``.
      fault: kind of the fault that hit it, or None.
    """

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
    fault: str | None


def bytes_served(records: Iterable[RequestRecord]) -> int:
    """Return the bytes of objects that the server sent for these requests."""
    return sum(record.bytes_out for record in records if record.operation == "objects.media")


def bytes_received(records: Iterable[RequestRecord]) -> int:
    """Return the body bytes that the server received for these requests, framing included."""
    return sum(record.bytes_in for record in records)


def round_trips(records: Iterable[RequestRecord]) -> int:
    """Return the most requests of which each began after the one before had ended."""
    count, end_s = 0, 0.0
    for record in sorted(records, key=lambda each: each.time_s + each.seconds):
        if record.time_s >= end_s:
            count, end_s = count + 1, record.time_s + record.seconds
    return count
