"""Reads of TensorStore, each asked for once more when it is far behind the others.

The first answer wins. Each request receives into memory of its own: the one that loses is
cancelled, and nobody looks at what it still brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from absl import logging

from emergency_ckpt.core.restore.hedge import REQUEST_BYTES, ReadsInFlight
from emergency_ckpt.storage.calls import NOT_IN_TIME
from emergency_ckpt.work_progress import WorkProgress

OnHedged = Callable[[str, int, str], object]
"""Told of a second request: the leaf, the bytes that come twice at most, and why."""


def not_told(leaf: str, again_bytes: int, reason: str) -> None:
    """Say it in the log only."""
    logging.info("%s is read once more, %d bytes: %s", leaf, again_bytes, reason)


_INSPECTION_S = 0.1
_INSPECTION_OF_TWO_S = 0.005


class Request:
    """A future of TensorStore; with ``then`` what that makes of its result, when it is there."""

    def __init__(self, future: Any, then: Callable[[Any], Any] | None = None) -> None:
        self._future = future
        self._then = then

    def done(self) -> bool:
        """Return whether ``result`` returns or raises at once."""
        if self._then is not None and self._future.done() and self._future.exception() is None:
            self._future, self._then = self._then(self._future.result()), None
        return self._future.done()

    def wait(self, timeout_s: float) -> None:
        """Block until the future that is awaited now is done, for so long at most."""
        with suppress(TimeoutError):
            self._future.exception(timeout=timeout_s)

    def result(self) -> Any:
        return self._future.result()

    def came_bytes(self) -> int:
        """Return how much of ``nbytes`` is known to have come."""
        return 0

    def cancel(self) -> None:
        self._future.cancel()


class Requests:
    """Futures that are awaited together, as one read of ``REQUEST_BYTES`` for each."""

    def __init__(self, futures: Mapping[str, Any]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """As of ``Request``."""
        return all(future.done() for future in self._futures.values())

    def wait(self, timeout_s: float) -> None:
        """As of ``Request``, for one that is not done."""
        pending = (future for future in self._futures.values() if not future.done())
        if (future := next(pending, None)) is not None:
            Request(future).wait(timeout_s)

    def result(self) -> Mapping[str, Any]:
        """Return the futures."""
        return self._futures

    def came_bytes(self) -> int:
        """As of ``Request``."""
        return REQUEST_BYTES * sum(future.done() for future in self._futures.values())

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()


Asked = Request | Requests


class Read:
    """A read in flight: one request, or two."""

    def __init__(self, name: str, nbytes: int, first: Asked, again: Callable[[], Asked]) -> None:
        self.name = name
        self.nbytes = nbytes
        self.requests = [first]
        self.again = again


class HedgedReads:
    """The reads of one step, from one thread.

    Args:
      progress: each answer is a sign of it; DeadlineExceeded when nothing moves any more.
    """

    def __init__(self, item: str, progress: WorkProgress, on_hedged: OnHedged) -> None:
        self._item = item
        self._progress = progress
        self._on_hedged = on_hedged
        self._reads: dict[Read, None] = {}
        self._in_flight = ReadsInFlight[Read]()

    def ask(
        self,
        name: str,
        nbytes: int,
        first: Asked,
        again: Callable[[], Asked],
        *,
        piece_bytes: int | None = None,
    ) -> Read:
        """Note the first request of a read; ``again`` makes the second. ``result`` waits.

        ``nbytes``, ``piece_bytes``: as in ``ReadsInFlight``.
        """
        read = Read(name, nbytes, first, again)
        self._reads[read] = None
        self._in_flight.begin(read, nbytes, time.monotonic(), piece_bytes=piece_bytes)
        return read

    def result(self, read: Read, is_right: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the first answer. Blocks; without an answer the error of the last request.

        ``is_right``: asked only while there is another request, which is waited for if not.
        """
        try:
            while True:
                for request in tuple(read.requests):
                    if request.done() and self._is_taken(read, request, is_right):
                        self._progress.touch()
                        return request.result()
                if time.monotonic() >= self._progress.deadline_s:
                    raise self._progress.error("read", self._item, NOT_IN_TIME)
                look_s = _INSPECTION_S if len(read.requests) == 1 else _INSPECTION_OF_TWO_S
                read.requests[0].wait(min(look_s, self._progress.left_s))
                if not read.requests[0].done():
                    self.ask_again()
        finally:
            self._forget(read)

    def cancel(self) -> None:
        """Cancel all that is in flight."""
        for read in tuple(self._reads):
            self._forget(read)

    def _is_taken(self, read: Read, request: Asked, is_right: Callable[[Any], bool]) -> bool:
        """Return whether its answer is that of the read; else drop it, and wait for the other."""
        if len(read.requests) == 1:
            return True
        try:
            if is_right(request.result()):
                return True
            problem = "its bytes are not those of capture time"
        except Exception as error:  # noqa: BLE001 - the other request's result is the read's
            problem = str(error)
        logging.warning("one of two reads of %s failed: %s", read.name, problem)
        read.requests.remove(request)
        return False

    def ask_again(self) -> None:
        now_s = time.monotonic()
        for read in self._in_flight.names():
            if read.requests[0].done():
                self._in_flight.end(read, now_s)
            else:
                self._in_flight.saw(read, read.requests[0].came_bytes(), 0, now_s)
        for read in self._in_flight.names():
            if (behind := self._in_flight.behind(read, now_s)) is not None:
                read.requests.append(read.again())
                self._on_hedged(read.name, behind.again_bytes, behind.reason)

    def _forget(self, read: Read) -> None:
        is_complete = len(read.requests) == 1 and read.requests[0].done()
        self._in_flight.end(read, time.monotonic(), is_complete=is_complete)
        self._reads.pop(read, None)
        for request in read.requests:
            request.cancel()
