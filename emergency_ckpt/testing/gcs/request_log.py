"""What was asked of the server: one record a request, kept in memory up to a limit. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import islice

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the server saw it.

    Attributes:
      index: position in the order in which requests ended, from 0, never reused.
      time_s: when it began, unix time.
      seconds: how long it took, faults included.
      method, path: as sent; the path is decoded and has its query.
      operation: ``objects.media``, ``objects.insert``, ... (``routes.py``), ``unknown``.
      target: ``bucket/object``; ``bucket/`` for requests about a bucket.
      status: HTTP status that was sent, None when no reply began.
      bytes_in: bytes of the request's body that were read.
      bytes_out: bytes of the reply's body that were handed to the connection.
      range_header: the ``Range`` or ``Content-Range`` that was asked for.
      client: address and port of the client's end of the connection.
      user_agent: what the client says it is.
      fault: kind of the fault that hit it, None for none.
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
        """Stores the record under the next index, whatever index it has."""
        self._records.append(msgspec.structs.replace(record, index=self._next_index))
        self._next_index += 1

    def clear(self) -> None:
        self._records.clear()

    def page(self, since: int, count: int) -> list[RequestRecord]:
        """Up to ``count`` records with ``index >= since``, in order."""
        if not self._records:
            return []
        start = max(since - self._records[0].index, 0)
        return list(islice(self._records, start, start + count))


def bytes_served(
    records: Iterable[RequestRecord], *, operation: str = "objects.media", target: str = "*"
) -> int:
    """Body bytes that left the server for these requests: object data, unless told otherwise."""
    return sum(
        record.bytes_out
        for record in records
        if fnmatchcase(record.operation, operation) and fnmatchcase(record.target, target)
    )


def bytes_received(
    records: Iterable[RequestRecord], *, operation: str = "*", target: str = "*"
) -> int:
    """Body bytes that reached the server for these requests, multipart framing included."""
    return sum(
        record.bytes_in
        for record in records
        if fnmatchcase(record.operation, operation) and fnmatchcase(record.target, target)
    )
