"""Announced steps: the leader says ahead of time which step all processes save.

This serves saves that do not follow from the step alone (continuous, adaptive, by the clock, a
user's policy).

1. The leader announces a step that no process should have reached, in a numbered list. It never
   changes an announcement and never takes one back.
2. A process that reads the announcement before it reaches the step saves at its first call from
   that step on. All processes make the same calls, so that call is the same on each.
3. A process that reads the announcement after that call is *late*. It votes against the save, which
   is then incomplete on all processes, and the leader announces that save once more.
4. Each process reports how long before its call it had read the announcement. The leader chooses
   the time ahead (the *lead*) from these reports. No training thread waits for a report.

Pure: no clock, no thread, no network. The processes compare durations only, so clocks may differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Annotated, NamedTuple

import msgspec

from emergency_ckpt.core.limits import MAX_INT
from emergency_ckpt.types import TierName

PROMPT_S = 0.5
"""So long after an announcement each process waits for the next one; then it looks at intervals."""
LEAD_AT_FIRST_S = 0.05
"""The lead before two steps have shown how long one takes."""
LONGEST_LEAD_S = 60.0
_FIRST_LEAD_S = 0.1
_SHORTEST_LEAD_S = 0.01
_POLL_S = 0.25
_POLLS_PER_S = 2000.0
"""Looks of all processes together that the coordination service takes."""
_LEAD_OVER_NEED = 2.0
_LEAD_DECAY = 0.97
_FAR_TOO_LONG = 4.0
_RECENT_NEEDS = 32
_KEPT_CALLS = 1024
_NONE = -1
_Number = Annotated[int, msgspec.Meta(ge=_NONE, le=MAX_INT)]
_Millis = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All processes save to ``tier`` at their first call from ``step`` on.

    Attributes:
      number: rises from 0 by one.
      tier: None in the last announcement of the list, which names no step.
      exact: they save at ``step`` itself, or not at all if training jumps over it.
    """

    number: int
    tier: TierName | None
    step: int = _NONE
    exact: bool = False


class SaveReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The newest facts that one process has about its saves to one tier.

    Attributes:
      ended: the newest step whose save has ended here, or was left out; -1 before the first.
      number: of the newest announcement for which this process came to the call; -1 for none.
      spare_ms: time from reading that announcement to the call; negative for a late process.
      stall_ms: the stall of the training thread at the newest save.
    """

    ended: _Number = _NONE
    number: _Number = _NONE
    spare_ms: _Millis = 0
    stall_ms: _Millis = 0


class Met(NamedTuple):
    """An announcement for which this process has come to the call, which was for ``step``.

    ``spare_s``: as in ``SaveReport``, in seconds.
    """

    announcement: Announcement
    step: int
    spare_s: float


class Follower:
    """The announcements as one process knows them. Not thread-safe."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT_CALLS)
        self._ahead: dict[int, tuple[Announcement, float]] = {}

    def is_ahead(self, step: int) -> bool:
        """Return whether this process has not come to ``step`` yet."""
        return not self._calls or step > self._calls[-1][0]

    def read(self, announcement: Announcement, now_s: float) -> Met | None:
        """Take an announcement; return the call for which it comes too late, if there is one."""
        if self.is_ahead(announcement.step):
            self._ahead[announcement.number] = announcement, now_s
            return None
        meant: tuple[int, float] | None = None
        for call in reversed(self._calls):
            # A greater step before a smaller one is of a loop that went back.
            if call[0] < announcement.step or (meant is not None and call[0] >= meant[0]):
                break
            meant = call
        else:
            # The calls before those that are kept are unknown.
            meant = meant if len(self._calls) < _KEPT_CALLS else None
        if meant is None or (announcement.exact and meant[0] != announcement.step):
            return None
        step, called_s = meant
        return Met(announcement, step, called_s - now_s)

    def arrive(self, step: int, now_s: float) -> tuple[Met, ...]:
        """Note a call for ``step``; return the announcements by which the step is saved."""
        self._calls.append((step, now_s))
        reached = [entry for entry in self._ahead.values() if entry[0].step <= step]
        for announcement, _ in reached:
            del self._ahead[announcement.number]
        return tuple(
            Met(announcement, step, now_s - read_s)
            for announcement, read_s in reached
            if announcement.step == step or not announcement.exact
        )


class Lead:
    """The time by which an announcement comes before its step, from what the processes need."""

    def __init__(self, process_count: int) -> None:
        self._shortest_s = _SHORTEST_LEAD_S
        self._prompt_s = _FIRST_LEAD_S
        self._quiet_s = 2 * poll_s(process_count)
        if process_count == 1:  # this process knows what it announces
            self._shortest_s = self._prompt_s = self._quiet_s = 0.0
        self._needs_s: deque[float] = deque(maxlen=_RECENT_NEEDS)

    def seconds(self, *, is_prompt: bool) -> float:
        """Return the lead. ``is_prompt``: all processes wait for the announcement."""
        return self._prompt_s if is_prompt else max(self._prompt_s, self._quiet_s)

    def note(self, own: SaveReport, others: Collection[SaveReport]) -> bool:
        """Learn from the reports on the announcement of the leader's own report.

        Returns whether a process was late.
        """
        spares_ms = [report.spare_ms for report in others if report.number == own.number]
        if not spares_ms:
            return False
        # The leader itself knows an announcement from its beginning on.
        need_s = max(0, own.spare_ms - min(spares_ms)) / 1e3
        is_late = min(spares_ms) < 0
        self._needs_s.append(need_s)
        # One pause of a process is an exception; two of them are not.
        usual_s = _LEAD_OVER_NEED * sorted(self._needs_s)[max(0, len(self._needs_s) - 2)]
        usual_s = max(self._shortest_s, usual_s)
        # With a slow decay one pause would delay saves for minutes.
        decay = 0.5 if self._prompt_s > _FAR_TOO_LONG * usual_s else _LEAD_DECAY
        lead_s = max(decay * self._prompt_s, usual_s)
        if is_late:
            lead_s = max(2 * self._prompt_s, 2 * need_s)
        self._prompt_s = min(LONGEST_LEAD_S, lead_s)
        return is_late


def poll_s(process_count: int) -> float:
    """Return the pause between two looks of a process for an announcement."""
    return max(_POLL_S, process_count / _POLLS_PER_S)


class Progress(NamedTuple):
    """The progress of the leader's training thread.

    Attributes:
      step: the last step it reached, at ``arrived_s`` on the leader's clock.
      step_time_s: seconds per step, as measured.
      stride: steps between the last two calls of ``save``.
      recent: the steps of the last calls, the newest last.
    """

    step: int
    arrived_s: float
    step_time_s: float
    stride: int = 1
    recent: tuple[int, ...] = ()

    def first_step(self, now_s: float, lead_s: float) -> int:
        """Return the earliest step that no process should reach within ``lead_s`` from now."""
        passed_s = max(0.0, now_s - self.arrived_s)
        steps = math.ceil((passed_s + lead_s) / max(self.step_time_s, 1e-6))
        return self.step + max(1, steps)


def before_first_step(step: int, now_s: float) -> Progress:
    """Return the progress before a life's first steps, which come after ``step``, one by one.

    The next step is expected after ``LEAD_AT_FIRST_S``, since the first steps are compiled.
    """
    return Progress(step, now_s, 1.5 * LEAD_AT_FIRST_S, recent=(step, step))


class StepClock:
    """Measures the time per step over the last steps. Not thread-safe."""

    _KEPT = 32

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    def arrive(self, step: int, now_s: float) -> None:
        """Record that ``step`` was reached at ``now_s``. A lower step restarts the measurement.

        The same step again, as of ``should_save`` after ``save``, changes nothing.
        """
        if self._seen and step == self._seen[-1][0]:
            return
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((step, now_s))
        if len(self._seen) > self._KEPT:
            del self._seen[0]

    @property
    def progress(self) -> Progress | None:
        """Return the progress; None until two steps were seen."""
        if len(self._seen) < 2:
            return None
        (first, first_s), (last, last_s) = self._seen[0], self._seen[-1]
        recent = tuple(step for step, _ in self._seen)
        step_time_s = max(0.0, (last_s - first_s) / (last - first))
        return Progress(last, last_s, step_time_s, last - recent[-2], recent)
