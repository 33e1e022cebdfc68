"""The decision which read of a restore is asked for once more, from elsewhere if possible. Pure.

A read is behind when it is late by the rate of the others, as a whole or since its last byte; and
all in flight are when nothing has come for longer than they all take at the rate so far. So reads
that are all slow are behind together, which is to say not at all. A second request costs bytes that
come twice, so there is a bound on these; a read that stalls is asked for beyond it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from emergency_ckpt.core.limits import MAX_HEDGED_SHARE, MAX_HEDGED_SHARE_WHEN_IDLE

TIMES = 3
"""A read takes so much longer than by the others' rate before it is late."""
PATIENCE_S = 1.0
"""Added to that: a pause of a process or of a network is no reason to read twice."""
STALLED = 4
"""A read that is late by so many times both has stalled."""
REQUEST_BYTES = 1 << 20
"""A request takes as long as so many bytes beside its own: small reads compare with large ones."""
UNKNOWN_RATE = 4 << 20
"""Bytes a second that all reads together are taken to have while nothing is known."""
_RECENT = 64

_Name = TypeVar("_Name", bound=Hashable)


class Behind(NamedTuple, Generic[_Name]):
    """A read to ask for once more.

    Attributes:
      again_bytes: bytes that come twice, at most.
      reason: how slow it is, beside the others.
    """

    name: _Name
    again_bytes: int
    reason: str


@dataclass
class _Read:
    nbytes: int
    piece_bytes: int
    began_s: float
    moved_s: float
    came_bytes: int = 0
    kept_bytes: int = 0
    is_hedged: bool = False

    @property
    def next_bytes(self) -> int:
        """Bytes that come at once."""
        return min(self.piece_bytes, self.nbytes - self.came_bytes)


class ReadsInFlight(Generic[_Name]):
    """The reads of one restore on one process, by name. All times are of ``time.monotonic``.

    Attributes:
      hedged_bytes: bytes that came twice so far, at most.
    """

    def __init__(self) -> None:
        self.hedged_bytes = 0
        self._asked_bytes = 0
        self._spent_bytes = 0
        self._reads: dict[_Name, _Read] = {}
        self._moving: set[_Name] = set()
        self._came_bytes = 0
        self._next_bytes = REQUEST_BYTES
        self._began_s = self._moved_s = 0.0
        self._rates: deque[float] = deque(maxlen=_RECENT)

    def begin(
        self, name: _Name, nbytes: int, now_s: float, *, piece_bytes: int | None = None
    ) -> None:
        """Note a request of ``nbytes``, of which at least ``piece_bytes`` come at once.

        ``piece_bytes``: None: nothing is known of it before it has ended.
        """
        if not self._asked_bytes:
            self._began_s = now_s
        self._moved_s = now_s
        self._asked_bytes += nbytes + REQUEST_BYTES
        piece_bytes = nbytes if piece_bytes is None else piece_bytes
        self._reads[name] = read = _Read(nbytes, piece_bytes, now_s, now_s)
        self._next_bytes += read.next_bytes

    def saw(self, name: _Name, came_bytes: int, kept_bytes: int, now_s: float) -> None:
        """Note how many bytes have come, and how many of them stay if the read is given up."""
        read = self._reads[name]
        if came_bytes > read.came_bytes:
            self._came_bytes += came_bytes - read.came_bytes
            self._next_bytes -= read.next_bytes
            read.came_bytes, read.moved_s, self._moved_s = came_bytes, now_s, now_s
            self._next_bytes += read.next_bytes
            self._moving.add(name)
        read.kept_bytes = kept_bytes

    def end(self, name: _Name, now_s: float, *, is_complete: bool = True) -> None:
        """Note that nobody waits for the read any more. Idempotent."""
        read = self._reads.pop(name, None)
        self._moving.discard(name)
        if read is None:
            return
        self._next_bytes -= read.next_bytes
        if is_complete:
            self._came_bytes += read.nbytes - read.came_bytes
            self._moved_s = now_s
            self._rates.append(_rate(read.nbytes, now_s - read.began_s))

    def names(self) -> list[_Name]:
        """Return the reads in flight that were not asked for once more."""
        return [name for name, read in self._reads.items() if not read.is_hedged]

    def behind(self, name: _Name, now_s: float) -> Behind[_Name] | None:
        """Return why to ask for a read once more, at most once; None while it is not behind."""
        read = self._reads[name]
        if read.is_hedged or now_s - read.began_s <= PATIENCE_S:
            return None
        rate, is_quiet = self._rate_beside(name, now_s), self._is_quiet(now_s)
        if not is_quiet and not _is_late(read, now_s, rate):
            return None
        share = MAX_HEDGED_SHARE_WHEN_IDLE if is_quiet else MAX_HEDGED_SHARE
        has_budget = self._spent_bytes < share * self._asked_bytes
        if not (
            has_budget or _is_late(read, now_s, rate, STALLED) or self._is_quiet(now_s, STALLED)
        ):
            return None
        again_bytes = read.came_bytes - read.kept_bytes + read.next_bytes
        read.is_hedged = True
        self.hedged_bytes += again_bytes
        self._spent_bytes += again_bytes + REQUEST_BYTES
        others = "no other to compare with" if rate is None else f"others {rate / 1e6:.1f} MB/s"
        reason = (
            f"{read.came_bytes} of {read.nbytes} bytes in {now_s - read.began_s:.1f} s,"
            f" none for {now_s - read.moved_s:.1f} s; {others}"
        )
        return Behind(name, again_bytes, reason)

    def _rate_beside(self, name: _Name, now_s: float) -> float | None:
        """Return the usual rate of the other reads, in bytes a second; None: not known."""
        moving = (self._reads[other] for other in self._moving if other != name)
        rates = [*self._rates, *(_rate(each.came_bytes, now_s - each.began_s) for each in moving)]
        return median(rates) if rates else None

    def _is_quiet(self, now_s: float, times: int = 1) -> bool:
        """Return whether nothing has come, or was asked for, for too long."""
        rate, elapsed_s = UNKNOWN_RATE, self._moved_s - self._began_s
        if self._came_bytes and elapsed_s:
            rate = self._came_bytes / elapsed_s
        return now_s - self._moved_s > times * (PATIENCE_S + TIMES * self._next_bytes / rate)


def _rate(nbytes: int, elapsed_s: float) -> float:
    return (nbytes + REQUEST_BYTES) / max(elapsed_s, 1e-6)


def _is_late(read: _Read, now_s: float, rate: float | None, times: int = 1) -> bool:
    """Return whether the read is late as a whole, or the bytes that come next are."""
    if rate is None:
        return False

    def is_late(since_s: float, nbytes: int) -> bool:
        expected_s = (nbytes + REQUEST_BYTES) / rate
        return now_s - since_s > times * (PATIENCE_S + TIMES * expected_s)

    whole_bytes = read.came_bytes + read.next_bytes
    return is_late(read.began_s, whole_bytes) or is_late(read.moved_s, read.next_bytes)
