"""``BackgroundListener``: takes events at once, and works on them in a thread of its own."""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Final

from absl import logging

from emergency_ckpt.events import Event
from emergency_ckpt.forked import drop_in_child

_QUEUE_LIMIT: Final = 4096
_CLOSE_TIMEOUT_S: Final = 5.0


class BackgroundListener:
    """A listener whose ``take`` may block or fail; its first failure is logged.

    Events beyond 4096 that wait are dropped, so that a silent file system or service costs no more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_failed = self._is_off = False
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"eckpt-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        drop_in_child(self, BackgroundListener._forget)

    def __call__(self, event: Event) -> None:
        """Take ``event``; never blocks or raises."""
        if not self._is_off and self._waiting.qsize() < _QUEUE_LIMIT:
            self._waiting.put(event)

    def close(self) -> None:
        """Work off what waits, for 5 s at most. Idempotent. Also called at the program's end."""
        if self._is_off:
            return
        self._is_off = True
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def take(self, event: Event) -> None:
        """Work on one event, in the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Release what ``take`` has opened, in the thread, after the last event."""

    def _forget(self) -> None:
        """In a forked child, which has no thread."""
        self._is_off = True
        atexit.unregister(self.close)

    def _loop(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self.take(event)
            except Exception as error:  # noqa: BLE001 - must not end the thread
                if not self._has_failed:
                    logging.warning("%s: %s; events are dropped", self._name, error)
                self._has_failed = True
        self.end()
