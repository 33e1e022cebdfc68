"""Jobs that get SIGTERM at a bad moment: ``bad_moments_job.py ROOT SLICES MOMENT SETTINGS``.

The signal comes from the process itself, at the moment that the test names, so that no test waits
for a moment. Each process writes down what it saw, as it saw it; ``test_bad_moments.py`` judges.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from configs import config_with
from continuous_job import Training
from job_process import Iterator, JobProcess

from emergency_ckpt.cluster.coordination import connect
from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

LAST = 400
AT = 20
PACE_S = 0.02


class Moment:
    """What happens to one process, the last one, and what all do besides training.

    ``here``: called by all at each place of the loop, which it names.
    """

    def __init__(self, name: str, world: JobProcess, settings: dict[str, Any]) -> None:
        self._name = name
        self._world = world
        self._is_hit = world.process == world.count - 1
        self._pause_s = settings.pop("pause_s", 0.0)

    def here(self, place: str, step: int = 0) -> None:
        if (place, step) == ("before the first save", 1) and self._name == "compile":
            self._signal_in(0.5)
            time.sleep(self._pause_s)
        if (place, step) == ("after a save", AT):
            if self._name in ("evaluation", "evaluation at the end"):
                self._signal_in(0.5)
                time.sleep(self._pause_s)
            if self._name in ("twice", "once"):
                self._signal_in(0.0)
            if self._name == "rank gone":
                self._world.meet()
                if self._world.process == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._signal_in(0.0)
                time.sleep(self._pause_s)  # as in a collective that waits for the one that is gone
        if place == "start" and self._name == "before the start":
            self._signal_in(0.0)
        if place == "start" and self._name == "in the start":
            self._signal_in(0.05)

    def listen(self, event: Any) -> None:
        if self._name == "twice" and event.point == "persistent.stage.started":
            os.kill(os.getpid(), signal.SIGTERM)

    def _signal_in(self, delay_s: float) -> None:
        if self._is_hit:
            threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGTERM]).start()


def main(root: Path, slices: int, name: str, settings: dict[str, Any]) -> None:
    env = JobEnvironment.from_environ()
    initialize_job(env)
    world = JobProcess(root, env.process_index, env.process_count, slices, connect("meeting"))
    path = root / f"seen_{env.restart_count}_{world.process}.jsonl"

    def note(**fields: Any) -> None:
        with path.open("a") as log:
            log.write(json.dumps(fields) + "\n")

    moment = Moment(name, world, settings)

    def listen(event: Any) -> None:
        if event.name.startswith(("save.", "persistent.", "preemption.", "stop.")):
            note(event=event.point, **event.fields)
        moment.listen(event)

    training, iterator = Training(slices), Iterator(world.process)
    defaults: dict[str, Any] = {
        "run_id": "life",
        "dir": str(root / "persistent"),
        "local_dir": str(env.local_dir),
        "mesh": training.mesh,
        "local_save_every": 5,
        "save_every": 10_000,
        "total_timeout_s": 60,
        "save_timeout_s": 30,
        "on_event": listen,
    }
    last = settings.pop("last", LAST)
    config = config_with({**defaults, **settings})
    state, step = Training(slices).zero, 0
    moment.here("start")
    with config.instantiate() as ckpt:
        restored, found = ckpt.restore(state=training.spec, host_state=iterator)
        if restored is not None:
            state, step = found, restored
        note(restored=restored, right=Training.is_at(state, step))
        while step < last:
            state = training.step(state)
            step += 1
            moment.here("before the first save", step)
            ckpt.save(step=step, state=state, host_state=iterator.at(step))
            if ckpt.reached_preemption(step):
                note(left_at=step)
                ckpt.wait_until_finished()
                raise SystemExit(PREEMPTED_EXIT_CODE)
            moment.here("after a save", step)
            time.sleep(PACE_S)
        note(finished=step)


if __name__ == "__main__":
    given = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], given)
