"""The progress of one piece of work on this process, and the deadline that it puts off.

Who moves bytes adds them; who waits for them waits until ``deadline_s``, and looks again then: it
is later whenever something has moved. ``core.stall`` has the rules.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque

from emergency_ckpt.core.stall import (
    Move,
    ProcessWork,
    ProgressDecision,
    TimeLimits,
    decide_progress,
    give_up_at_s,
    rate_of,
    window_bytes,
)
from emergency_ckpt.errors import DeadlineExceeded

_SAMPLES = 64
"""So many are kept; those that follow closely become one."""
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
        self._ended = ""
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
            self._first = Move(time.monotonic(), 0)
            self._samples: deque[Move] = deque([self._first], _SAMPLES)
            self._moves += 1

    def again(self) -> None:
        """Begin the part once more after a failure, which is no sign of progress."""
        with self._lock:
            self._done = 0
            self._first = Move(self._samples[-1].at_s, 0)
            self._samples = deque([self._first], _SAMPLES)

    def expect(self, nbytes: int, piece_bytes: int = 0) -> None:
        """Note that the part has so many bytes more, of which ``piece_bytes`` come at once."""
        with self._lock:
            self._total += nbytes
            self._piece = max(self._piece, piece_bytes)

    def add(self, nbytes: int) -> None:
        """Note that bytes have moved. DeadlineExceeded once the work was given up."""
        self.touch(nbytes)
        if self._ended:
            raise DeadlineExceeded("go on with", self._doing or "the work", self._ended)

    def touch(self, nbytes: int = 0) -> None:
        """Note a sign of progress, which may have no bytes: an answer, or others that move."""
        now_s = time.monotonic()
        with self._lock:
            self._done += nbytes
            self._moves += 1
            if len(self._samples) > 1 and now_s - self._samples[-2].at_s < self._sample_s:
                self._samples.pop()
            self._samples.append(Move(now_s, self._done))

    @property
    def _sample_s(self) -> float:
        return self.limits.stall_s / 12

    @property
    def moved_s(self) -> float:
        """Return the time of ``time.monotonic`` at which something moved last."""
        with self._lock:
            return self._samples[-1].at_s

    @property
    def deadline_s(self) -> float:
        """Return the time of ``time.monotonic`` at which it is given up, unless something moves."""
        with self._lock:
            if self._ended:
                return -math.inf
            moved_s = self._samples[-1].at_s
            return give_up_at_s(moved_s, self.limits, self.end_s, self._piece)

    @property
    def left_s(self) -> float:
        """Return the seconds until then, at least a millisecond."""
        return max(0.001, self.deadline_s - time.monotonic())

    def decide(self) -> ProgressDecision:
        """Decide whether the work goes on; what is too slow is given up."""
        now_s = time.monotonic()
        with self._lock:
            decision = decide_progress(
                now_s,
                [self._first, *self._samples],
                self._total,
                self.limits,
                self.end_s,
                self._piece,
            )
            if decision.kind == "too_slow" and self._doing:
                self._ended = decision.reason
        return decision

    def error(self, operation: str, target: str, problem: str) -> DeadlineExceeded:
        """Return the error of a wait that has reached ``deadline_s``."""
        is_fixed = math.isinf(self.limits.stall_s)  # the error of the call says enough
        reason = "" if is_fixed else self._ended or self.decide().reason
        return DeadlineExceeded(operation, target, f"{problem}: {reason}" if reason else problem)

    def window_bytes(self, most_bytes: int) -> int:
        """Return how much to ask for at once, so that something moves before it would stall."""
        with self._lock:
            last = self._samples[-1]
            rate = rate_of(last.at_s, [self._first, *self._samples], self.limits)
        return window_bytes(rate, self.limits, most_bytes)

    @property
    def work(self) -> ProcessWork:
        """Return what others are told of it."""
        rate, now_s = 0.0, time.monotonic()
        with self._lock:
            rate = rate_of(now_s, [self._first, *self._samples], self.limits)
            left = max(0, self._total - self._done)
            return ProcessWork(self._moves, self._doing, self._done, left, rate)
