"""The rules on how long work that moves bytes may take, and whom the others stop waiting for. Pure.

A process judges its own work by its own clock (``give_up_at_s``): the work goes on while bytes
move, and ends when no byte has moved for the stall limit, or at the total. Of other processes a
process knows the beats alone (``BeatLog``), and their times of arrival by its own clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import msgspec

from emergency_ckpt.core.wording import seconds_text, size_text

_PATIENCE_IN_STALLS = 10
USUAL_PIECE_BYTES = 64 << 20
"""The largest chunk that this package writes: 1.1 MB/s bring it within the usual stall limit."""
_SLOWEST_BYTES_PER_S = 2e6
"""An answer of more than ``USUAL_PIECE_BYTES`` has more time, by this rate for the bytes beyond: no
byte of an answer is seen before all bytes have arrived."""


@dataclasses.dataclass(frozen=True)
class TimeLimits:
    """The limits of one kind of work, in seconds.

    Attributes:
      stall_s: longest time in which nothing moves.
      total_s: longest time of the whole, however much moves.
    """

    stall_s: float
    total_s: float

    @property
    def patience_s(self) -> float:
        """Return the limit of what moves without bytes: a process that comes, a caller's code."""
        return min(self.total_s, _PATIENCE_IN_STALLS * self.stall_s)

    @property
    def beat_s(self) -> float:
        """Return the time from one beat of a process to the next."""
        return self.stall_s / 4


def give_up_at_s(moved_s: float, limits: TimeLimits, end_s: float, piece_bytes: int = 0) -> float:
    """Return the time at which work that last moved at ``moved_s`` has stalled.

    ``piece_bytes``: the largest part of it that comes in one answer.
    """
    longer_s = max(0, piece_bytes - USUAL_PIECE_BYTES) / _SLOWEST_BYTES_PER_S
    return min(end_s, moved_s + limits.stall_s + longer_s)


def stall_reason(
    now_s: float,
    moved_s: float,
    limits: TimeLimits,
    end_s: float,
    done_bytes: int,
    total_bytes: int,
) -> str:
    """Return why work whose time is over does not go on."""
    done = f"{size_text(done_bytes)} of {size_text(max(total_bytes, done_bytes))} done"
    if now_s >= end_s:
        return f"it was not done in {seconds_text(limits.total_s)}: {done}"
    return f"nothing has moved for {seconds_text(now_s - moved_s)}: {done}"


class ProcessWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of one process, as the process reports it.

    Attributes:
      moves: rises with every move.
      doing: the current part of the work; empty while the process waits for others.
      rate: bytes a second since the part began.
    """

    moves: int = 0
    doing: str = ""
    done_bytes: int = 0
    left_bytes: int = 0
    rate: float = 0.0

    @property
    def left_s(self) -> float:
        """Return the seconds that the rest takes at this rate."""
        if not self.left_bytes:
            return 0.0
        return self.left_bytes / self.rate if self.rate > 0 else math.inf


def slowest(works: Mapping[int, ProcessWork]) -> int | None:
    """Return the process that will take longest; None where no process has bytes left."""
    unfinished = {p: work for p, work in works.items() if work.left_bytes}
    return max(
        unfinished, key=lambda p: (unfinished[p].left_s, unfinished[p].left_bytes, -p), default=None
    )


class BeatLog:
    """The beats of other processes, and when these came by this process's clock."""

    def __init__(self, limits: TimeLimits, now_s: float) -> None:
        self._limits = limits
        self._begun_s = now_s
        self._beats: dict[int, tuple[int, ProcessWork]] = {}
        self._came_s: dict[int, float] = {}
        self._moved_s: dict[int, float] = {}

    @property
    def works(self) -> dict[int, ProcessWork]:
        """Return the newest report of each process."""
        return {process: work for process, (_, work) in self._beats.items()}

    def came(self, processes: Collection[int], now_s: float) -> None:
        """Note that ``processes`` have come to the work: from now on they should send beats."""
        for process in set(processes) - self._beats.keys():
            self.note(process, 0, ProcessWork(), now_s)

    def note(self, process: int, number: int, work: ProcessWork, now_s: float) -> None:
        """Note the newest beat of ``process``; ``number``: its count by the sender."""
        before = self._beats.get(process)
        if before is None or before[0] != number:
            self._came_s[process] = now_s
        if before is None or before[1].moves != work.moves or not work.doing:
            self._moved_s[process] = now_s
        self._beats[process] = number, work

    def stuck(self, processes: Collection[int], now_s: float) -> dict[int, str]:
        """Return the processes that nobody should wait for any more, each with a sentence.

        A process that has sent nothing may come late. A process that sends no more is gone or
        hangs. A process that reports work which does not move should have ended the work.
        """
        sentences: dict[int, str] = {}
        for process in sorted(processes):
            if process not in self._beats:
                if now_s - self._begun_s >= self._limits.patience_s:
                    waited = seconds_text(now_s - self._begun_s)
                    sentences[process] = f"process {process} has not come in {waited}"
                continue
            work = self._beats[process][1]
            silent_s, still_s = now_s - self._came_s[process], now_s - self._moved_s[process]
            if silent_s >= self._limits.stall_s:
                text = f"has sent nothing for {seconds_text(silent_s)}"
                sentences[process] = f"process {process} {text}; last: {_work_text(work)}"
            elif still_s >= self._limits.patience_s:
                text = f"is stuck since {seconds_text(still_s)}: {_work_text(work)}"
                sentences[process] = f"process {process} {text}"
        return sentences


def _work_text(work: ProcessWork) -> str:
    total = work.done_bytes + work.left_bytes
    done = f", {size_text(work.done_bytes)} of {size_text(total)} done" if total else ""
    return f"{work.doing or 'waiting for others'}{done}"
