"""Programs of which some end a process, or part its processes; ``test_crashed_program.py``."""

from __future__ import annotations

import os
import signal

from job_process import JobProcess, run_program


def before(world: JobProcess) -> int:
    world.meet()
    return world.process


def crashes(world: JobProcess) -> None:
    world.meet()
    if world.process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.meet()


def parts(world: JobProcess) -> None:
    """Process 1 raises, and so misses the meetings of the other."""
    world.meet_timeout_s = 1.0
    if world.process == 1:
        raise ValueError("scripted")
    world.meet()


def after(world: JobProcess) -> int:
    world.meet()
    world.meet()
    return world.process


PROGRAMS = {program.__name__: program for program in (before, parts, crashes, after)}

if __name__ == "__main__":
    run_program(PROGRAMS)
