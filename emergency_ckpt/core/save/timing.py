"""Rules by the clock: continuous, at intervals; pauses after failures. Pure.

The leader alone decides, on its own clock, and announces the step: see ``announcements``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable


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


@runtime_checkable
class TimingRule(Protocol):
    """Decides from the clock. The leader alone is asked.

    Attributes:
      words: the rule in a few words, for the line of the start: ``"every 30 s"``.
    """

    @property
    def words(self) -> str: ...

    def due(self, status: TierStatus) -> bool:
        """Return whether a save should start now."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuous:
    """A save starts when the previous one is complete, at least ``minimum_interval_s`` after it."""

    minimum_interval_s: float = 0.0
    words = "continuously"

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``; the first save is due at once."""
        if status.busy:
            return False
        return not status.has_saved or status.since_last_s >= self.minimum_interval_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class EverySeconds:
    """A save starts every ``interval_s``, the first one that long after the start."""

    interval_s: float

    @property
    def words(self) -> str:
        """As ``TimingRule``."""
        return f"every {self.interval_s:g} s"

    def due(self, status: TierStatus) -> bool:
        """As ``TimingRule``."""
        return not status.busy and status.since_last_s >= self.interval_s


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
