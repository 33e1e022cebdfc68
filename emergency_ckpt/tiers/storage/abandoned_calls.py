"""Timed-out calls that may still change a step.

A client continues after the timeout, for half a minute or for ever. Its late change must not
affect a later save of the same step: a removal would delete its arrays, a marker would make it
count too soon. So this process changes a step only when all such calls on it have ended. Requests
of another process end with that process.
"""

from __future__ import annotations

import threading
import time

from emergency_ckpt.errors import DeadlineExceeded


class LateChanges:
    """The timed-out calls on all directories of this process, by path and step. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], list[threading.Thread]] = {}

    def note(self, directory: str, step: int, call: threading.Thread) -> None:
        """Record the timed-out ``call``, which may change ``step`` while it is alive."""
        with self._lock:
            for key in list(self._calls):
                self._keep_alive(key)
            self._calls.setdefault((directory, step), []).append(call)

    def wait(self, directory: str, step: int, deadline_s: float) -> None:
        """Block until all calls on ``step`` have ended.

        DeadlineExceeded at ``deadline_s`` of ``time.monotonic``.
        """
        for call in self._alive(directory, step):
            call.join(max(0.0, deadline_s - time.monotonic()))
        if self.under_way(directory, step):
            problem = "an earlier call that changes this step has timed out and not ended"
            raise DeadlineExceeded("use storage at", f"{directory}/{step}", problem)

    def under_way(self, directory: str, step: int) -> bool:
        """Return True when a call on ``step`` has not ended. Does not block."""
        return bool(self._alive(directory, step))

    def _alive(self, directory: str, step: int) -> list[threading.Thread]:
        with self._lock:
            return self._keep_alive((directory, step))

    def _keep_alive(self, key: tuple[str, int]) -> list[threading.Thread]:
        """Remove the calls that have ended; return the others. The caller holds ``_lock``."""
        alive = [call for call in self._calls.pop(key, ()) if call.is_alive()]
        if alive:
            self._calls[key] = alive
        return list(alive)


LATE_CHANGES = LateChanges()
