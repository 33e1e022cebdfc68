"""Processes that leave while others train on: by an exception, by ``stop``, or at the end."""

from __future__ import annotations

import contextlib
from typing import Any

from job_process import Iterator, JobProcess, mesh_of, programs_of, run_program, state_at

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError, SaveFailed

LEFT_AT = 7
SKIPPED_STEPS = (10, 15, 20)
SKIP_TIMEOUT_S = 12.0
"""Longer than the leader waits for a process that was too late before as well."""


def _train(world: JobProcess, name: str, last: int, end_at: int | None, **settings: Any) -> Any:
    """Save at each fifth step; process 1 leaves by an exception at step ``end_at``."""
    mesh = mesh_of(world.slices)
    # Two minutes, as is the default: nothing here may depend on it.
    config = world.config(name, mesh=mesh, save_timeout_s=120, **settings)
    iterator, errors, ended = Iterator(world.process), list[str](), ""
    try:
        with contextlib.suppress(ValueError), config.instantiate() as ckpt:
            for step in range(1, last + 1):
                if world.process == 1 and step == end_at:
                    raise ValueError("boom")
                ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
                ckpt.wait_until_finished()
                if error := _outcome(ckpt):
                    errors.append(error)
    except SaveFailed as error:
        ended = str(error)
    return {
        "complete": [event["step"] for event in world.named("save.complete")],
        "stored": [event["step"] for event in world.named("persistent.complete")],
        "errors": errors,
        "ended": ended,
    }


def one_raises(world: JobProcess) -> Any:
    storage = {"dir": str(world.root / "stored_raises"), "save_every": 10}
    return _train(world, "raises", 15, LEFT_AT, **storage)


def all_end(world: JobProcess) -> Any:
    storage = {"dir": str(world.root / "stored_end"), "save_every": 5}
    return _train(world, "end", 10, None, **storage)


def one_skips(world: JobProcess) -> Any:
    """Process 1 does not call ``save`` at the steps 10 to 20, as a mistaken loop does."""
    mesh = mesh_of(world.slices)
    config = world.config("skips", mesh=mesh, save_timeout_s=SKIP_TIMEOUT_S)
    iterator, outcomes = Iterator(world.process), dict[int, str]()
    with config.instantiate() as ckpt:
        for step in range(5, 31, 5):
            if world.process == 0 or step not in SKIPPED_STEPS:
                ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
                ckpt.wait_until_finished()
                outcomes[step] = _outcome(ckpt)
            world.meet()
    return {"outcomes": outcomes, "complete": [e["step"] for e in world.named("save.complete")]}


def _outcome(ckpt: EmergencyCheckpointer) -> str:
    try:
        ckpt.check_for_errors()
    except CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run_program(programs_of(globals()))
