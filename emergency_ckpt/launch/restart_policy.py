"""The decision to restart a job after the end of a life. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from emergency_ckpt.launch.job import LifeResult

Decision = Literal["finish", "restart", "give-up"]


def decide(
    lives: Sequence[LifeResult],
    *,
    max_restarts: int,
    breaker_deaths: int,
    is_configuration: bool = False,
) -> tuple[Decision, str]:
    """Return the decision after the last of ``lives``, and its reason.

    ``is_configuration``: a process of the last one was ended by a ConfigError.
    """
    last = lives[-1]
    if last.ending == "finished":
        return "finish", "all processes finished"
    if last.ending in ("stopped", "timeout"):
        return "give-up", "stopped on request" if last.ending == "stopped" else "out of time"
    if is_configuration:
        return "give-up", "a configuration error, which no restart mends"
    idle = deaths_without_progress(lives)
    if idle >= breaker_deaths:
        return "give-up", f"crash loop: {idle} deaths in a row without progress"
    if len(lives) > max_restarts:
        return "give-up", f"the limit of {max_restarts} restarts is reached"
    return "restart", "hung" if last.ending == "hung" else str(last.first_death)


def deaths_without_progress(lives: Sequence[LifeResult]) -> int:
    """Return the number of deaths at the end of ``lives`` without a higher step.

    A life that repeats steps and dies where its predecessor died makes no progress, as with a bad
    batch or a bug at one step. Lives that an injected fault ended do not count.
    """
    count = 0
    furthest = -1
    for life in lives:
        if life.step > furthest:
            count = 0
            furthest = life.step
        elif not life.injected:
            count += 1
    return count
