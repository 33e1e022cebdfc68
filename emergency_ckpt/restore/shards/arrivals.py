"""Shards as they arrive: from the threads that fetch and check them to the one that uses them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.types import ShardId


class Arrivals:
    """A queue of shards that are here and checked. ``deadline_s``: of ``time.monotonic``."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: list[ShardId] = []
        self._ended = False

    def put(self, *shards: ShardId) -> None:
        """These can be used from now on. From any thread."""
        with self._changed:
            self._waiting.extend(shards)
            self._changed.notify_all()

    def end(self) -> None:
        """No more will come: all are here, or something failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[list[ShardId]]:
        """Yield the shards that arrived since the last look. Waits; DeadlineExceeded."""
        while True:
            with self._changed:
                left_s = max(0.0, self._deadline_s - time.monotonic())
                if not self._changed.wait_for(lambda: self._waiting or self._ended, left_s):
                    raise DeadlineExceeded("restore", "shards", "they did not come in time")
                found, self._waiting = self._waiting, []
            if not found:
                return
            yield found
