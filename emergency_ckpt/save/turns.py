"""The saves to RAM that get no turn, because saves come too fast.

Processes that leave saves to RAM out on their own may never write the same save. Suppose that
process A writes a save that B has left out; while A writes, A leaves out the next save, which B
writes, and so on. So where saves come too fast, the leader leaves a save out for all processes
(``Turns``). The leader waits for its turn for a little less time than the others, and its
decision on a save names the newest save that the leader has left out by then. The others wait for
that decision in any case, and leave out the saves that the decision names.
"""

from __future__ import annotations

import threading

from emergency_ckpt.cluster.left_processes import Place, in_order
from emergency_ckpt.types import SaveId

_EARLIER_S = 10.0
"""The leader gives up its turn so much earlier: its decision reaches all some seconds later."""


class Turns:
    """The saves that the leader has left out, as this process knows them. Thread-safe."""

    def __init__(self, *, leads: bool) -> None:
        self._leads = leads
        self._lock = threading.Lock()
        self._is_decided = False
        self._left_out: Place | None = None

    def limit_s(self, timeout_s: float) -> float:
        """Return how long this process waits for its turn, at most ``timeout_s``."""
        return max(timeout_s / 2, timeout_s - _EARLIER_S) if self._leads else timeout_s

    def begin(self) -> None:
        """Note that a save begins, which has no decision yet."""
        with self._lock:
            self._is_decided = False

    def leave_out(self, save: SaveId) -> bool:
        """At the leader: leave ``save`` out for all processes; return whether that was possible.

        Too late after the decision on the save under way, for which all processes wait.
        """
        with self._lock:
            if not self._leads or self._is_decided:
                return False
            self._left_out = in_order(save)
            return True

    def announce(self, *, ends_wait: bool) -> Place | None:
        """At the leader: return the newest save that is left out, for a decision.

        ``ends_wait``: it is the decision on the save under way, after which all begin the next.
        """
        with self._lock:
            self._is_decided = self._is_decided or ends_wait
            return self._left_out

    def hear(self, left_out: Place | None) -> None:
        """Note the newest left-out save that a decision of the leader names."""
        with self._lock:
            if left_out is not None and (self._left_out is None or left_out > self._left_out):
                self._left_out = left_out

    def is_left_out(self, save: SaveId) -> bool:
        with self._lock:
            return self._left_out is not None and in_order(save) <= self._left_out
