"""When a tier whose saves fail may try again, and when a repeated failure is told again. Pure."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from emergency_ckpt.core.save.save_rules import SaveDecision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
    """Doubling pause after failed saves in a row; none after the first, which may be a hiccup.

    ``first_s`` after the second, at most ``longest_s``.
    """

    first_s: float = 1.0
    longest_s: float = 300.0

    def pause_s(self, failures: int) -> float:
        """Pause after so many failed saves in a row, in seconds."""
        if failures <= 1:
            return 0.0
        # The exponent is bounded: a float has room for a thousand doublings only.
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 2, 64))

    def decide(self, failures: int, since_failure_s: float) -> SaveDecision:
        """Whether a save may start ``since_failure_s`` after the last of ``failures`` in a row."""
        pause_s = self.pause_s(failures)
        if since_failure_s >= pause_s:
            return SaveDecision(True, f"{failures} saves failed in a row; a pause of {pause_s:g} s")
        return SaveDecision(
            False,
            f"{failures} saves failed in a row: {since_failure_s:.3g} s of a pause of"
            f" {pause_s:g} s have passed",
        )


class Mention(NamedTuple):
    """``is_new``: never mentioned before. ``times``: occurrences since the last mention."""

    is_new: bool
    times: int


@dataclasses.dataclass
class Repeats:
    """Decides when to mention something that happens again and again. Not thread-safe.

    The first occurrence is mentioned, then their number, every ``interval_s`` at most.
    """

    interval_s: float = 60.0
    most_keys: int = 64
    _mentioned: dict[str, tuple[float, int]] = dataclasses.field(
        default_factory=dict[str, tuple[float, int]], init=False
    )

    def occurred(self, key: str, now_s: float) -> Mention | None:
        """How to mention that ``key`` happens at ``now_s``, a monotonic time; None: not at all."""
        known = self._mentioned.pop(key, None)
        mention: Mention | None = None
        if known is None:
            mention = Mention(is_new=True, times=1)
        elif now_s - known[0] >= self.interval_s:
            mention = Mention(is_new=False, times=known[1] + 1)
        # At the end again: what has not happened for the longest time is forgotten first.
        self._mentioned[key] = (now_s, 0) if mention or known is None else (known[0], known[1] + 1)
        while len(self._mentioned) > self.most_keys:
            del self._mentioned[next(iter(self._mentioned))]
        return mention
