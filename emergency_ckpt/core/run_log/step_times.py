"""Seconds for each step of a run, with the saves that began at it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from emergency_ckpt.core.run_log.lives import JobLife
from emergency_ckpt.core.run_log.run_events import RunEvent, whole
from emergency_ckpt.types import LOCAL, PERSISTENT

MAX_POINTS = 5000


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds that the job took for ``step``.

    Attributes:
      seconds: where only steps with a save were logged, the mean since the one before.
      tiers: tiers in which a save of this step began.
    """

    life: int
    step: int
    seconds: float
    tiers: frozenset[str]


def step_times_of(lives: Iterable[JobLife], events: Iterable[RunEvent]) -> list[StepTime]:
    """Return the times by life and step. The first step known of a life has none."""
    saved: dict[tuple[int, int], set[str]] = {}
    for event in events:
        step = whole(event, "step")
        if event.name == "save.started" and step is not None:
            tier = PERSISTENT if event.fields.get("tier") == PERSISTENT else LOCAL
            saved.setdefault((event.life, step), set()).add(tier)
    found: list[StepTime] = []
    for life in lives:
        for (low, low_s), (high, high_s) in itertools.pairwise(life.steps):
            found.append(
                StepTime(
                    life=life.number,
                    step=high,
                    seconds=(high_s - low_s) / (high - low),
                    tiers=frozenset(saved.get((life.number, high), ())),
                )
            )
    return found


def sampled(times: Sequence[StepTime]) -> list[StepTime]:
    """Return at most about ``MAX_POINTS``: every step of a short run, every n-th of a long one."""
    stride = -(-len(times) // MAX_POINTS)
    return list(times[:: max(1, stride)])
