"""The scheduler of the simulation that runs now; one at a time in an operating system process."""

from __future__ import annotations

from scheduler import Scheduler

scheduler: Scheduler = Scheduler(0)


def begin(seed: int) -> Scheduler:
    """Make the scheduler of a new simulation the current one, and return it."""
    global scheduler  # noqa: PLW0603 - one simulation at a time
    scheduler = Scheduler(seed)
    return scheduler
