"""Two processes that write one step to storage, the first of which is slow at a chosen place."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from etils.epath import backend
from job_process import JobProcess, programs_of, run_program
from restoring import restore, train

STEP = 5
_POLL_S = 0.01
_OTHERS_S = 6.0
"""A writer that does not wait for the first has written its first bytes by then."""


class SlowFolder:
    """The folder of the step, made only when something lies there already, or late."""

    def __init__(self) -> None:
        self.was_there: list[bool] = []
        kind = type(backend.os_backend)
        for name in ("mkdir", "makedirs"):
            self._delay(kind, name)

    def _delay(self, kind: type[Any], name: str) -> None:
        make = getattr(kind, name)

        def wait_and_make(backend_: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            folder = Path(path)
            if folder.name.startswith(f"{STEP}."):
                self.was_there.append(self._wait_for(folder))
            return make(backend_, path, *args, **kwargs)

        setattr(kind, name, wait_and_make)

    @staticmethod
    def _wait_for(folder: Path) -> bool:
        deadline_s = time.monotonic() + _OTHERS_S
        while not folder.exists() and time.monotonic() < deadline_s:
            threading.Event().wait(_POLL_S)
        return folder.exists()


def slow_folder(world: JobProcess) -> Any:
    """The first writer is slow to make the folder into which both write."""
    slow = SlowFolder() if world.process == 0 else None
    world.meet()
    storage = {"dir": str(world.root / "stored"), "save_every": STEP}
    train(world, "slow", range(1, STEP + 1), local_save_every=0, **storage)
    complete = [event["step"] for event in world.named("persistent.complete")]
    found = restore(world, "slow", local_save_every=0, **storage)
    return {**found, "complete": complete, "was_there": slow.was_there if slow else []}


if __name__ == "__main__":
    run_program(programs_of(globals()))
