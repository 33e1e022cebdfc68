"""Agreement, off the training thread, on the step at which all processes save.

It serves saves that cannot be decided from the step alone (continuous, adaptive, by the clock).

1. The leader proposes a step that no process should have reached.
2. Each process accepts before it reaches the step, or answers that it is late or busy.
3. The leader decides: yes when all accepted, else no.
4. A process that accepted and reaches the step before the decision takes the snapshot and holds it:
   on yes it saves it, on no it discards it.

Guaranteed: on yes all processes save the step, however late the decision arrives; on no none does.

Pure: no clock, no thread, no network. Only the leader's clock is used, so clocks may differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from emergency_ckpt.types import TierName

FIRST_LEAD_S = 0.05
LONGEST_LEAD_S = 60.0
_LEAD_OVER_ROUND_TRIP = 2.0
_LEAD_DECAY = 0.97
_RECENT = 3
_FAR_TOO_LONG = 4.0


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's proposal that all save to ``tier`` at the first ``save`` from ``step`` on.

    All processes train the same steps, so this is the same call on each, for any distance between
    steps and any calls skipped before.

    Attributes:
      number: rises from 0.
      waits: the save is due even if the previous one is not complete; ``save`` then waits for it.
      exact: at ``step`` itself, or not at all if training jumps over it.
    """

    number: int
    tier: TierName
    step: int
    waits: bool = False
    exact: bool = False


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process's answer to a proposal.

    Attributes:
      kind: ``late``: the step was reached already. ``busy``: the previous save is in progress.
      step: the last step that this process reached.
      stall_s: stall of its training thread at the newest save to that tier.
    """

    kind: Literal["accepted", "late", "busy"]
    step: int
    stall_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's decision on a proposal, the same for all processes."""

    confirmed: bool
    reason: str = ""


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


def before_first_step(step: int, now_s: float) -> Progress:
    """Return the progress before a life's first steps, of which ``step`` is the last before them.

    The next steps are expected one by one, which costs nothing where others come.
    """
    return Progress(step, now_s, 1.5 * FIRST_LEAD_S, recent=(step, step))


class Due(NamedTuple):
    """A save that is due at the step just reached; ``number`` is its proposal's."""

    tier: TierName
    number: int
    confirmed: bool


class Follower:
    """One process's side, the leader's own included. Not thread-safe."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._accepted: dict[int, Proposal] = {}
        self._confirmed: set[int] = set()

    @property
    def step(self) -> int | None:
        """The last step reached; None before the first."""
        return self._step

    def arrive(self, step: int) -> tuple[Due, ...]:
        """Record that the training thread reached ``step``; return the saves that are due here."""
        self._step = step
        if not self._accepted:
            return ()
        reached = [p for p in self._accepted.values() if p.step <= step]
        due = tuple(
            Due(p.tier, p.number, p.number in self._confirmed)
            for p in reached
            if p.step == step or not p.exact
        )
        for proposal in reached:
            del self._accepted[proposal.number]
            self._confirmed.discard(proposal.number)
        return due

    def offer(self, proposal: Proposal, *, ready: bool, stall_s: float = 0.0) -> Answer:
        """Return the answer to ``proposal``. An accepted save takes place unless the decision is
        no.
        """
        step = -1 if self._step is None else self._step
        if self._step is not None and proposal.step <= self._step:
            return Answer("late", step, stall_s)
        if not (ready or proposal.waits):
            return Answer("busy", step, stall_s)
        self._accepted[proposal.number] = proposal
        return Answer("accepted", step, stall_s)

    def on_decision(self, number: int, *, confirmed: bool) -> None:
        """Apply the leader's decision on proposal ``number``, before or after its step."""
        if number not in self._accepted:
            return
        if confirmed:
            self._confirmed.add(number)
        else:
            del self._accepted[number]


class Leader:
    """Chooses steps far enough ahead and decides proposals, one at a time. Not thread-safe."""

    def __init__(self, process_count: int, timeout_s: float) -> None:
        self._process_count = process_count
        self._timeout_s = timeout_s
        self._lead_s = FIRST_LEAD_S
        self._recent_s: deque[float] = deque(maxlen=_RECENT)  # how long proposals took
        self._steps_ahead = 0.0
        self._next_number = 0
        self._open: Proposal | None = None
        self._proposed_s = 0.0

    @property
    def lead_s(self) -> float:
        """Time between a proposal and its step."""
        return self._lead_s

    def first_step(self, progress: Progress, now_s: float) -> int:
        """Return the earliest step that no process should reach before the proposal arrives."""
        passed_s = max(0.0, now_s - progress.arrived_s)
        steps = math.ceil((passed_s + self._lead_s) / max(progress.step_time_s, 1e-6))
        return progress.step + max(1, steps) + math.ceil(self._steps_ahead)

    def propose(
        self,
        tier: TierName,
        step: int,
        now_s: float,
        *,
        waits: bool = False,
        exact: bool = False,
    ) -> Proposal:
        """Open a proposal. AssertionError while another one is open."""
        assert self._open is None, "one proposal at a time"
        self._open = Proposal(self._next_number, tier, step, waits, exact)
        self._next_number += 1
        self._proposed_s = now_s
        return self._open

    def decide(self, answers: Mapping[int, Answer], own_step: int, now_s: float) -> Decision | None:
        """Return the decision on the open proposal, or None while answers are missing.

        Args:
          answers: by process, as received so far.
          own_step: the last step that the leader's own training thread reached.
        """
        assert self._open is not None, "no proposal is open"
        ahead = max((answer.step - own_step for answer in answers.values()), default=0)
        refused = [p for p, answer in sorted(answers.items()) if answer.kind != "accepted"]
        if refused:
            answer = answers[refused[0]]
            if any(answers[p].kind == "late" for p in refused):
                self._grow_lead(now_s)
                self._steps_ahead = max(self._steps_ahead, ahead)
            self._open = None
            return Decision(False, f"process {refused[0]} is {answer.kind} at step {answer.step}")
        if len(answers) == self._process_count:
            self._shrink_lead(now_s)
            self._steps_ahead = max(0.9 * self._steps_ahead, ahead, 0.0)
            self._steps_ahead = 0.0 if self._steps_ahead < 0.5 else self._steps_ahead
            self._open = None
            return Decision(True)
        if now_s - self._proposed_s < self._timeout_s:
            return None
        missing = sorted(set(range(self._process_count)) - answers.keys())
        self._open = None
        return Decision(False, f"no answer from processes {missing[:8]} in {self._timeout_s:g} s")

    def abandon(self, reason: str) -> Decision:
        """Close the open proposal; the decision on it is no."""
        self._open = None
        return Decision(False, reason)

    def withdraw(self, now_s: float) -> None:
        """Drop the open proposal, which no other process has seen; its step has passed."""
        self._grow_lead(now_s)
        self._next_number -= 1
        self._open = None

    def _grow_lead(self, now_s: float) -> None:
        taken_s = now_s - self._proposed_s
        self._recent_s.append(taken_s)
        self._lead_s = min(LONGEST_LEAD_S, max(2 * self._lead_s, 2 * taken_s))

    def _shrink_lead(self, now_s: float) -> None:
        self._recent_s.append(now_s - self._proposed_s)
        floor_s = _LEAD_OVER_ROUND_TRIP * self._recent_s[-1]
        usual_s = max(FIRST_LEAD_S, _LEAD_OVER_ROUND_TRIP * max(self._recent_s))
        # A save takes at least one lead; with a slow decay one pause would delay saves for minutes.
        decay = 0.5 if self._lead_s > _FAR_TOO_LONG * usual_s else _LEAD_DECAY
        self._lead_s = min(LONGEST_LEAD_S, max(decay * self._lead_s, floor_s))


class StepClock:
    """Measures the time per step over the last steps. Time is an argument; not thread-safe."""

    _KEPT = 32

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    def arrive(self, step: int, now_s: float) -> None:
        """Record that ``step`` was reached at ``now_s``. A lower step restarts the measurement."""
        if self._seen and step <= self._seen[-1][0]:
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
