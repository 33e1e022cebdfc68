"""The progress of one piece of work on this process, and the deadline that the progress puts off.

A thread that moves bytes adds them. A thread that waits for bytes waits until ``deadline_s``, and
then looks again: the deadline is later whenever bytes have moved, or this process did not run.
``core.stall`` has the rules.
"""

from __future__ import annotations

import math
import threading
import time

from emergency_ckpt.core.stall import ProcessWork, TimeLimits, give_up_at_s, stall_reason
from emergency_ckpt.errors import DeadlineExceeded

_LONGEST_MARGIN_S = 10.0
_TICKS_IN_A_STALL = 8
_LEAVE_S = 1.0


class RunClock:
    """The time of ``time.monotonic``, less that in which this process did not run, while inside.

    An engine may pause a job or its machine for hours, in which nothing moves and nothing hangs. A
    thread ticks, and between two ticks the clock advances by two periods at most: so the clock has
    no time of a pause, even before that thread runs again. Thread-safe; no method blocks.
    """

    def __init__(self, stall_s: float) -> None:
        """``stall_s``: the limit that is judged by this clock; a pause counts a quarter of it."""
        self._tick_s = stall_s / _TICKS_IN_A_STALL
        self._lock = threading.Lock()
        self._paused_s = 0.0
        self._ticked_s = math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def now_s(self) -> float:
        with self._lock:
            return self._at(time.monotonic())

    def _at(self, now_s: float) -> float:
        return min(now_s, self._ticked_s + 2 * self._tick_s) - self._paused_s

    def __enter__(self) -> RunClock:
        self._ticked_s = time.monotonic()
        self._thread = threading.Thread(target=self._tick, name="eckpt-clock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _tick(self) -> None:
        while True:
            is_ended = self._ended.wait(self._tick_s)
            with self._lock:
                now_s = time.monotonic()
                self._paused_s = now_s - self._at(now_s)
                self._ticked_s = math.inf if is_ended else now_s
            if is_ended:
                return


class WorkProgress:
    """The bytes that one piece of work moves. Thread-safe; no method blocks.

    Attributes:
      limits: as given.
      clock: by which a stall is judged; whoever begins the work enters it.
      end_s: the end of the total time, of ``time.monotonic``; a little early, so that all
        processes still receive the reason.
    """

    def __init__(self, limits: TimeLimits) -> None:
        self.limits = limits
        self.clock = RunClock(limits.stall_s)
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
        """Begin a part of the work; ``doing`` is empty for a wait for others."""
        with self._lock:
            self._doing = doing
            self._done = 0
            self._total = total_bytes
            self._piece = 0
            self._begun_s = self._moved_s = self.clock.now_s()
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
        self.touch(nbytes)

    def touch(self, nbytes: int = 0) -> None:
        """Note a sign of progress, which may have no bytes: an answer, or others that move."""
        now_s = self.clock.now_s()
        with self._lock:
            self._done += nbytes
            self._moves += 1
            self._moved_s = now_s

    @property
    def moved_s(self) -> float:
        """The time of the last move, of ``time.monotonic``; a pause since is left out."""
        with self._lock:
            return time.monotonic() - (self.clock.now_s() - self._moved_s)

    @property
    def deadline_s(self) -> float:
        """The time of ``time.monotonic`` at which the work is given up, unless something moves."""
        moved_s = self.moved_s
        with self._lock:
            return give_up_at_s(moved_s, self.limits, self.end_s, self._piece)

    @property
    def left_s(self) -> float:
        """The seconds until the deadline, at least a millisecond."""
        return max(0.001, self.deadline_s - time.monotonic())

    def error(self, operation: str, target: str, problem: str) -> DeadlineExceeded:
        """Return the error of a wait that has reached ``deadline_s``."""
        if math.isinf(self.limits.stall_s):  # the error of the call says enough
            return DeadlineExceeded(operation, target, problem)
        moved_s = self.moved_s
        with self._lock:
            reason = stall_reason(
                time.monotonic(),
                moved_s,
                self.limits,
                self.end_s,
                done_bytes=self._done,
                total_bytes=self._total,
            )
        return DeadlineExceeded(operation, target, f"{problem}: {reason}")

    @property
    def work(self) -> ProcessWork:
        """The report to other processes."""
        now_s = self.clock.now_s()
        with self._lock:
            rate = self._done / max(now_s - self._begun_s, 1e-6)
            left = max(0, self._total - self._done)
            return ProcessWork(self._moves, self._doing, self._done, left, rate)
