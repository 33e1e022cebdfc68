"""The progress of one piece of work on this process, and the deadline that it puts off.

Who moves bytes adds them; who waits for them waits until ``deadline_s``, and looks again then: it
is later whenever something has moved. ``core.stall`` has the rules.
"""

from __future__ import annotations

import math
import threading
import time

from emergency_ckpt.core.stall import ProcessWork, TimeLimits, give_up_at_s, stall_reason
from emergency_ckpt.errors import DeadlineExceeded

_LONGEST_MARGIN_S = 10.0


class WorkProgress:
    """The bytes that one piece of work moves. Thread-safe; no method blocks.

    Attributes:
      limits: as given.
      end_s: of ``time.monotonic``: when the total is nearly over, so that all learn why the work
        has ended, and not only of a deadline.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        margin_s = min(_LONGEST_MARGIN_S, limits.total_s / 10)
        self.end_s = time.monotonic() + limits.total_s - margin_s
        self._moves = 0
        self._doing = ""
        self.begin("")

    @classmethod
    def until(cls, deadline_s: float) -> WorkProgress:
        """Return one whose deadline is ``deadline_s`` of ``time.monotonic``, whatever moves."""
        made = cls(TimeLimits(math.inf, math.inf))
        made.end_s = deadline_s
        return made

    def begin(self, doing: str, total_bytes: int = 0) -> None:
        """Begin a part of the work; ``doing`` is empty while it is a wait for others."""
        with self._lock:
            self._doing = doing
            self._done = 0
            self._total = total_bytes
            self._piece = 0
            self._begun_s = self._moved_s = time.monotonic()
            self._moves += 1

    def again(self) -> None:
        """Begin the part once more after a failure, which is no sign of progress."""
        with self._lock:
            self._done = 0
            self._begun_s = self._moved_s

    def expect(self, nbytes: int, piece_bytes: int = 0) -> None:
        """Note that the part has so many bytes more, of which ``piece_bytes`` come at once."""
        with self._lock:
            self._total += nbytes
            self._piece = max(self._piece, piece_bytes)

    def add(self, nbytes: int) -> None:
        """Note that bytes have moved."""
        self.touch(nbytes)

    def touch(self, nbytes: int = 0) -> None:
        """Note a sign of progress, which may have no bytes: an answer, or others that move."""
        now_s = time.monotonic()
        with self._lock:
            self._done += nbytes
            self._moves += 1
            self._moved_s = now_s

    @property
    def moved_s(self) -> float:
        """Return the time of ``time.monotonic`` at which something moved last."""
        with self._lock:
            return self._moved_s

    @property
    def deadline_s(self) -> float:
        """Return the time of ``time.monotonic`` at which it is given up, unless something moves."""
        with self._lock:
            return give_up_at_s(self._moved_s, self.limits, self.end_s, self._piece)

    @property
    def left_s(self) -> float:
        """Return the seconds until then, at least a millisecond."""
        return max(0.001, self.deadline_s - time.monotonic())

    def error(self, operation: str, target: str, problem: str) -> DeadlineExceeded:
        """Return the error of a wait that has reached ``deadline_s``."""
        if math.isinf(self.limits.stall_s):  # the error of the call says enough
            return DeadlineExceeded(operation, target, problem)
        with self._lock:
            reason = stall_reason(
                time.monotonic(),
                self._moved_s,
                self.limits,
                self.end_s,
                done_bytes=self._done,
                total_bytes=self._total,
            )
        return DeadlineExceeded(operation, target, f"{problem}: {reason}")

    @property
    def work(self) -> ProcessWork:
        """Return what others are told of it."""
        now_s = time.monotonic()
        with self._lock:
            rate = self._done / max(now_s - self._begun_s, 1e-6)
            left = max(0, self._total - self._done)
            return ProcessWork(self._moves, self._doing, self._done, left, rate)
