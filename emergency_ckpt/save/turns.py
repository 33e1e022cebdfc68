"""Saves to RAM that are left out because the one before takes too long: by the leader, for all.

Processes that leave saves out on their own can take turns at it for ever: while one of them writes
a save that another one has left out, it leaves out the next save, which the other one writes. So
the leader waits for its turn a little less long than the others, and its decision on a save names
the newest save that it has left out by then. The others wait for that decision in any case, and
leave out what it names.
"""

from __future__ import annotations

import threading

from emergency_ckpt.cluster.left_processes import Place, in_order
from emergency_ckpt.types import SaveId

_EARLIER_S = 10.0
"""The leader gives up its turn so much earlier: a decision needs some seconds to come to all."""


class Turns:
    """The saves that the leader has left out, as this process knows them. Thread-safe."""

    def __init__(self, *, leads: bool) -> None:
        self._leads = leads
        self._lock = threading.Lock()
        self._is_decided = False
        self._left_out: Place | None = None

    def limit_s(self, timeout_s: float) -> float:
        """Return how long this process waits for its turn where all wait at most ``timeout_s``."""
        return max(timeout_s / 2, timeout_s - _EARLIER_S) if self._leads else timeout_s

    def begin(self) -> None:
        """A save begins, on which nothing is decided."""
        with self._lock:
            self._is_decided = False

    def leave_out(self, save: SaveId) -> bool:
        """At the leader: leave ``save`` out for all; False after the decision that all wait for."""
        with self._lock:
            if not self._leads or self._is_decided:
                return False
            self._left_out = in_order(save)
            return True

    def announce(self, *, ends_wait: bool) -> Place | None:
        """At the leader: return the newest save that is left out, for a decision.

        ``ends_wait``: the decision on the save under way, after which all begin the next one.
        """
        with self._lock:
            self._is_decided = self._is_decided or ends_wait
            return self._left_out

    def hear(self, left_out: Place | None) -> None:
        """Note what a decision of the leader says."""
        with self._lock:
            if left_out is not None and (self._left_out is None or left_out > self._left_out):
                self._left_out = left_out

    def is_left_out(self, save: SaveId) -> bool:
        """Return whether the leader has left ``save`` out."""
        with self._lock:
            return self._left_out is not None and in_order(save) <= self._left_out
