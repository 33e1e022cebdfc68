"""The pauses of a tier whose saves fail, and the intervals of repeated reports. Pure."""

from __future__ import annotations

import dataclasses

from emergency_ckpt.core.save.save_rules import SaveDecision


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

    def decide(self, failures: int, since_failure_s: float) -> SaveDecision:
        """Return whether a save may start ``since_failure_s`` after ``failures`` in a row."""
        pause_s = self.pause_s(failures)
        if since_failure_s >= pause_s:
            return SaveDecision(True, f"{failures} saves failed in a row; a pause of {pause_s:g} s")
        return SaveDecision(
            False,
            f"{failures} saves failed in a row: {since_failure_s:.3g} s of a pause of"
            f" {pause_s:g} s have passed",
        )


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
        self._mentioned[key] = (now_s, 0) if mention is not None else (known[0], known[1] + 1)
        while len(self._mentioned) > self.most_keys:
            del self._mentioned[next(iter(self._mentioned))]
        return mention
