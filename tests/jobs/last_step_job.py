"""Runs that end well, or not on all processes, with a newest step that RAM alone has.

Each program returns what its process saw; ``test_last_step.py`` judges.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import Any

from job_process import (
    Iterator,
    JobProcess,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)
from restoring import lose, process_dir, restore

from emergency_ckpt.events import Event, point_of
from emergency_ckpt.extras.striped import Striped

STORED, LAST = 2, 7


def _settings(world: JobProcess, name: str) -> dict[str, Any]:
    return {
        "dir": str(world.root / f"{name}_persistent"),
        "mesh": mesh_of(world.slices),
        "local_save_every": 1,
        "save_every": 1000,
        "stores_newest": True,
    }


def _train(
    world: JobProcess, name: str, *, end: Any = None, forced: int = 0, **settings: Any
) -> float:
    """Train to the end, which ``end`` may disturb; return how long the checkpointer took to stop.

    ``forced``: a step that is saved in both tiers.
    """
    mesh, iterator = settings["mesh"], Iterator(world.process)
    began_s = 0.0
    try:
        with world.config(name, **settings).instantiate() as ckpt:
            ckpt.restore(state=specs_on(mesh), host_state=iterator)
            for step in range(1, LAST + 1):
                state = state_at(step, mesh)
                data = iterator.at(step)
                ckpt.save(step=step, state=state, host_state=data, force=step == forced)
                ckpt.wait_until_finished()
            world.meet()
            began_s = time.monotonic()
            if end is not None:
                end()
    except KeyError:
        pass
    return time.monotonic() - began_s


def _seen(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    """What this process saw of the end, and what storage alone gives back."""
    stored = [each["step"] for each in world.named("persistent.complete")]
    warned = [each["text"] for each in world.named("stop.not_saved")]
    world.meet()
    if world.process == 0:
        shutil.rmtree(world.root / name)
    world.meet()
    return {"stored": stored, "warned": warned, **restore(world, name, **settings)}


def good_end(world: JobProcess) -> Any:
    settings = _settings(world, "good")
    _train(world, "good", **settings)
    return _seen(world, "good", **settings)


def one_slice_lost_afterwards(world: JobProcess) -> Any:
    """RAM goes on as well: the next life takes from storage only what it has to."""
    settings = _settings(world, "ram")
    _train(world, "ram", **settings)
    lose(world, "ram", 0)
    return restore(world, "ram", **settings)


def two_copies(world: JobProcess) -> Any:
    """No slice keeps all of the state that it holds."""
    settings = {**_settings(world, "copies"), "placement": Striped(2, 0)}
    _train(world, "copies", **settings)
    return _seen(world, "copies", **settings)


def host_state_gone(world: JobProcess) -> Any:
    settings = _settings(world, "gone")

    def end() -> None:
        if world.process == world.count - 1:
            for path in process_dir(world, "gone", world.process).glob(
                f"host_state/*-{LAST}/process_{world.process:05d}_*.json"
            ):
                path.unlink()

    _train(world, "gone", end=end, **settings)
    return _seen(world, "gone", **settings)


def one_ends_by_an_exception(world: JobProcess) -> Any:
    settings = _settings(world, "error")

    def end() -> None:
        if world.process == 1:
            raise KeyError("a bug")

    seconds = _train(world, "error", end=end, **settings)
    return {"seconds": seconds, **_seen(world, "error", **settings)}


def leader_ends_by_an_exception(world: JobProcess) -> Any:
    settings = _settings(world, "leader")

    def end() -> None:
        if world.process == 0:
            raise KeyError("a bug")

    seconds = _train(world, "leader", end=end, **settings)
    return {"seconds": seconds, **_seen(world, "leader", **settings)}


def dies(world: JobProcess) -> Any:
    """The first writer is killed when its host states are written, before any tensor is."""
    settings = _settings(world, "dies")
    _train(world, "dies", forced=STORED, on_event=lambda event: _kill(world, event), **settings)


def _kill(world: JobProcess, event: Event) -> None:
    is_written = point_of(event.name, event.fields) == "persistent.stage.host_states_written"
    is_last = is_written and event.fields["step"] == LAST
    if world.process == 0 and is_last:
        os.kill(os.getpid(), signal.SIGKILL)


def after_the_death(world: JobProcess) -> Any:
    return _seen(world, "dies", **_settings(world, "dies"))


if __name__ == "__main__":
    run_program(programs_of(globals()))
