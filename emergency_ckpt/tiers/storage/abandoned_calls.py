"""Calls that change a step, were given up, and are still at storage.

A client that nobody waits for goes on, for half a minute or for ever, and what it does then must
not meet a later save of the same step: a removal would take its arrays away, a marker would make
it count too soon. So nothing changes a step before that. Of this process: requests of one that
has ended end with it.
"""

from __future__ import annotations

import threading
import time

from emergency_ckpt.errors import DeadlineExceeded


class LateChanges:
    """Of all directories that this process uses, by path and step. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, int], list[threading.Thread]] = {}

    def note(self, directory: str, step: int, call: threading.Thread) -> None:
        """``call`` was given up; it changes ``step`` as long as it is alive."""
        with self._lock:
            for key in list(self._calls):
                self._keep_alive(key)
            self._calls.setdefault((directory, step), []).append(call)

    def wait(self, directory: str, step: int, deadline_s: float) -> None:
        """Return when all calls on ``step`` have ended.

        DeadlineExceeded when they have not by ``deadline_s`` of ``time.monotonic``.
        """
        for call in self._alive(directory, step):
            call.join(max(0.0, deadline_s - time.monotonic()))
        if self.under_way(directory, step):
            problem = "an earlier call that changes this step was given up, and has not ended"
            raise DeadlineExceeded("use storage at", f"{directory}/{step}", problem)

    def under_way(self, directory: str, step: int) -> bool:
        """Whether any call on ``step`` goes on. Does not wait."""
        return bool(self._alive(directory, step))

    def _alive(self, directory: str, step: int) -> list[threading.Thread]:
        with self._lock:
            return self._keep_alive((directory, step))

    def _keep_alive(self, key: tuple[str, int]) -> list[threading.Thread]:
        """Forget the calls that have ended; those that have not. ``_lock`` is held."""
        alive = [call for call in self._calls.pop(key, ()) if call.is_alive()]
        if alive:
            self._calls[key] = alive
        return list(alive)


LATE_CHANGES = LateChanges()
