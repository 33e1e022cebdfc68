"""Two processes that write one step to storage, the first of which is slow at a chosen place."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from etils.epath import backend
from job_process import JobProcess, run_program
from orbax.checkpoint._src.handlers.composite_checkpoint_handler import CompositeOptions
from restoring import restore, train

STEP = 5
_POLL_S = 0.01
_OTHERS_S = 6.0
"""A writer that does not wait for the first has written its first bytes by then."""


class SlowFolder:
    """The folder of the step's item, made only when something lies there already, or late."""

    def __init__(self) -> None:
        self.was_there: list[bool] = []
        kind = type(backend.os_backend)
        for name in ("mkdir", "makedirs"):
            self._delay(kind, name)

    def _delay(self, kind: type[Any], name: str) -> None:
        make = getattr(kind, name)

        def wait_and_make(backend_: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            folder = Path(path)
            if folder.name.startswith("default") and folder.parent.name.startswith(f"{STEP}."):
                self.was_there.append(self._wait_for(folder))
            return make(backend_, path, *args, **kwargs)

        setattr(kind, name, wait_and_make)

    @staticmethod
    def _wait_for(folder: Path) -> bool:
        deadline_s = time.monotonic() + _OTHERS_S
        while not folder.exists() and time.monotonic() < deadline_s:
            threading.Event().wait(_POLL_S)
        return folder.exists()


def _save_alone(world: JobProcess) -> None:
    """A checkpoint of this process's own, by Orbax, which numbers what each process does with it.

    From then on the others take what was said of this one for word of their common step.
    """
    me = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={world.process})
    options = CompositeOptions(multiprocessing_options=me)
    handler = ocp.CompositeCheckpointHandler(composite_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=me) as checkpointer:
        args = ocp.args.Composite(own=ocp.args.JsonSave({"x": 1}))
        checkpointer.save(epath.Path(world.root / "own"), args=args)


def slow_folder(world: JobProcess) -> Any:
    """The first writer is slow to make the folder into which both write."""
    slow = SlowFolder() if world.process == 0 else None
    if world.process == 0:
        _save_alone(world)
    world.meet()
    storage = {"dir": str(world.root / "stored"), "save_every": STEP}
    train(world, "slow", range(1, STEP + 1), local_save_every=0, **storage)
    complete = [event["step"] for event in world.named("persistent.complete")]
    found = restore(world, "slow", local_save_every=0, **storage)
    return {**found, "complete": complete, "was_there": slow.was_there if slow else []}


PROGRAMS = {program.__name__: program for program in (slow_folder,)}

if __name__ == "__main__":
    run_program(PROGRAMS)
