"""Rules by the clock: continuous, at intervals; pauses after failures. Pure.

The leader alone decides, on its own clock, and announces the step: see ``announcements``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_MENTIONED_AGAIN_S = 60.0
_MENTIONED_KEYS = 64


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
        return f"every {self.interval_s:g} s"

    def due(self, status: TierStatus) -> bool:
        return not status.busy and status.since_last_s >= self.interval_s


def backoff_s(failures: int) -> float:
    """Return the pause after ``failures`` consecutive failed saves, in seconds.

    There is none after the first failure, which may be transient; after each further failure the
    pause doubles.
    """
    if failures <= 1:
        return 0.0
    # The exponent is bounded: a float has room for a thousand doublings only.
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 2, 64))


class Repeats:
    """Decides when to report an event that repeats. Not thread-safe.

    The first occurrence is mentioned, then their number, once a minute at most.
    """

    def __init__(self) -> None:
        self._mentioned: dict[str, tuple[float, int]] = {}
        """By key, the time of the last mention and the occurrences since."""

    def occurred(self, key: str, now_s: float) -> int | None:
        """Return how often ``key`` is to be mentioned when it happens at monotonic time ``now_s``.

        0 the first time; then its occurrences since the last mention, or None when none is due.
        """
        # The key moves to the end, so that the key that is silent for longest is forgotten first.
        last_mention = self._mentioned.pop(key, None)
        mention: int | None = None
        if last_mention is None:
            mention = 0
        elif now_s - last_mention[0] >= _MENTIONED_AGAIN_S:
            mention = last_mention[1] + 1
        if last_mention is None or mention is not None:
            self._mentioned[key] = (now_s, 0)
        else:
            self._mentioned[key] = (last_mention[0], last_mention[1] + 1)
        if len(self._mentioned) > _MENTIONED_KEYS:
            del self._mentioned[next(iter(self._mentioned))]
        return mention
