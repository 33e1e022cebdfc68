"""``hang_job.py ROOT PORT PROCESS COUNT LAST SETTINGS``: one process of a job that may hang.

It is started as an engine starts it, by nothing of this project. ``SETTINGS`` may have ``hang``:
(process, step, "stop" or "iterator").
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

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer


class Data:
    """An iterator with a position; it stops the process, or waits for itself, at one step."""

    def __init__(self, process: int, hang: tuple[int, str] | None) -> None:
        self._process, self._hang, self._position = process, hang, 0

    def get_state(self) -> dict[str, int]:
        return {"position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def __next__(self) -> np.ndarray[Any, Any]:
        self._position += 1
        if self._hang is not None and self._position == self._hang[0]:
            if self._hang[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                lock = threading.Lock()
                with lock:
                    lock.acquire()
        return np.full((1, 4), self._position * (self._process + 1), np.float32)


def main() -> None:
    root, port = Path(sys.argv[1]), sys.argv[2]
    process, count, last = map(int, sys.argv[3:6])
    settings: dict[str, Any] = json.loads(sys.argv[6])
    hang = settings.pop("hang", (None, 0, ""))
    pause_s = settings.pop("pause_s", 0.0)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = Mesh(np.array(jax.devices()), ("slice",))
    state = jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec()))
    split = NamedSharding(mesh, PartitionSpec("slice"))
    step_of = jax.jit(lambda total, batch: total + batch.sum(0), donate_argnums=0)
    data = Data(process, tuple(hang[1:]) if hang[0] == process else None)
    out = root / f"out_{process}.jsonl"

    def note(**fields: Any) -> None:
        with out.open("a") as log:
            log.write(json.dumps(fields) + "\n")

    def listen(event: Any) -> None:
        if event.name in ("save.complete", "hang.found"):
            note(event=event.name, **event.fields)

    config = EmergencyCheckpointer.default_config().set(
        run_id="hang", local_dir=str(root / f"host{process}"), mesh=mesh
    )
    watch = settings.pop("on_event")
    config.set(local_save_every=1, on_event=[listen, watch], **settings)
    with config.instantiate() as ckpt:
        found, state = ckpt.restore(state=state, host_state=data)
        note(restored=found)
        for step in range((found or 0) + 1, last + 1):
            time.sleep(pause_s if step == 1 else 0.0)
            batch = jax.make_array_from_process_local_data(split, next(data))
            state = step_of(state, batch)
            jax.block_until_ready(state)
            ckpt.save(step=step, state=state, host_state=data)
        ckpt.wait_until_finished()
        note(total=np.asarray(state).tolist(), position=data.get_state()["position"])
    time.sleep(pause_s)


if __name__ == "__main__":
    main()
