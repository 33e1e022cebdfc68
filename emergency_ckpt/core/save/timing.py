"""Rules by the clock: continuous, at intervals, adaptive; pauses after failures. Pure.

The leader alone decides, on its own clock; then all processes agree: see ``step_agreement``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol


class TierStatus(NamedTuple):
    """The input of a rule.

    Attributes:
      busy: the previous save is not complete.
      has_saved: a step was saved or restored in this life of the job.
      since_last_s: from the start of the newest save (or from the start, before the first) to the
        moment at which a save decided now would start.
      stall_s: longest stall of a process's training thread at the newest save.
      save_s: time that the newest save took until it was complete.
      step_time_s: seconds per step.
    """

    busy: bool
    has_saved: bool
    since_last_s: float
    stall_s: float
    save_s: float
    step_time_s: float


class TimingRule(Protocol):
    """Decides from the clock."""

    def due(self, status: TierStatus) -> bool:
        """Return whether a save should start now."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuous:
    """A save starts when the previous one is complete, at least ``minimum_interval_s`` after it."""

    minimum_interval_s: float = 0.0

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``; the first save is due at once."""
        if status.busy:
            return False
        return not status.has_saved or status.since_last_s >= self.minimum_interval_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class EverySeconds:
    """A save starts every ``interval_s``, the first one that long after the start."""

    interval_s: float

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``."""
        return not status.busy and status.since_last_s >= self.interval_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveInterval:
    """Saves at the interval that loses the least time, from measured stalls.

    Frequent saves cost stalls; rare saves cost lost work at each failure. With a stall of
    ``d`` per save and a mean time between failures of ``M``, the work time between two saves that
    loses least is, to first order, ``sqrt(2 d M)`` (J. W. Young, "A first order approximation to
    the optimum checkpoint interval", CACM 17(9), 1974). For ``d < 2 M`` this is Daly's estimate of
    higher order (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3), 2006)::

        T = sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d

    and ``T = M`` otherwise. Here ``d`` is the stall of the training thread, since saves run in the
    background; the interval from start to start is ``T + d``. It is never so short that stalls take
    more than ``max_overhead`` of the time, nor shorter than a save takes until it is complete.

    Attributes:
      mean_time_between_failures_s: of the whole job, for failures of all kinds.
      max_overhead: maximum share of the time that training may be stalled, e.g. 0.01.
    """

    mean_time_between_failures_s: float
    max_overhead: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.mean_time_between_failures_s < math.inf:
            raise ValueError("mean_time_between_failures_s must be a positive number of seconds")
        if not 0 < self.max_overhead < 1:
            raise ValueError("max_overhead must lie between 0 and 1")

    def interval_s(self, stall_s: float, save_s: float = 0.0) -> float:
        """Return the seconds from the start of one save to the start of the next."""
        best_s = daly_interval_s(stall_s, self.mean_time_between_failures_s)
        return max(best_s, stall_s / self.max_overhead, save_s)

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``; the first save, which measures, is due at once."""
        if status.busy:
            return False
        return not status.has_saved or (
            status.since_last_s >= self.interval_s(status.stall_s, status.save_s)
        )


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval of higher order (2006, equation 37), from one save to the next.

    Daly gives the work between two saves; ``cost_s`` is added here, as an interval includes it.

    Args:
      cost_s: time that a save holds up training; finite, 0 or more.
      mtbf_s: mean time between failures of the whole job; finite, above 0.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s + cost_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
    """Doubling pause after consecutive failed saves; none after the first, which may be transient.

    ``first_s`` after the second, at most ``longest_s``.
    """

    first_s: float = 1.0
    longest_s: float = 300.0

    def pause_s(self, failures: int) -> float:
        """Return the pause after ``failures`` consecutive failed saves, in seconds."""
        if failures <= 1:
            return 0.0
        # The exponent is bounded: a float has room for a thousand doublings only.
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 2, 64))


@dataclasses.dataclass
class Repeats:
    """Decides when to report an event that repeats. Not thread-safe.

    The first occurrence is mentioned, then their number, every ``interval_s`` at most.
    """

    interval_s: float = 60.0
    most_keys: int = 64
    _mentioned: dict[str, tuple[float, int]] = dataclasses.field(
        default_factory=dict[str, tuple[float, int]], init=False
    )

    def occurred(self, key: str, now_s: float) -> int | None:
        """Return how often ``key`` is to be mentioned when it happens at monotonic time ``now_s``.

        0 the first time; then its occurrences since the last mention, or None when none is due.
        """
        known = self._mentioned.pop(key, None)
        mention: int | None = None
        if known is None:
            mention = 0
        elif now_s - known[0] >= self.interval_s:
            mention = known[1] + 1
        # Moved to the end, so that the key that is oldest is forgotten first.
        if known is None or mention is not None:
            self._mentioned[key] = (now_s, 0)
        else:
            self._mentioned[key] = (known[0], known[1] + 1)
        while len(self._mentioned) > self.most_keys:
            del self._mentioned[next(iter(self._mentioned))]
        return mention
