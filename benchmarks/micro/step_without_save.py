"""The cost of ``save`` on a step without a save, with and without event log and metrics.

Two checkpointers of one process take turns; the figures are medians over the rounds, both sides in
one run, of the training thread's CPU time. ``python -m benchmarks.micro.step_without_save``. Needs
a tmpfs at /dev/shm.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp

from emergency_ckpt import EmergencyCheckpointer

ROUNDS = 31
CALLS = 2000


def main() -> None:
    """Measure, and print one line of JSON; times in microseconds per call."""
    state = {"w": jnp.zeros(16)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        sides = {
            "off": _opened(Path(root) / "off", event_log="off"),
            "on": _opened(Path(root) / "on", event_log=f"{root}/log", metrics_port=0),
        }
        for checkpointer in sides.values():
            checkpointer.save(step=0, state=state)
            checkpointer.wait_until_finished()
        times_us: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(ROUNDS):
            for name in sorted(sides, reverse=bool(number % 2)):
                checkpointer = sides[name]
                first = 1 + number * CALLS
                begun_cpu_s = time.thread_time()
                for step in range(first, first + CALLS):
                    checkpointer.save(step=step, state=state)
                times_us[name].append((time.thread_time() - begun_cpu_s) / CALLS * 1e6)
        for checkpointer in sides.values():
            checkpointer.stop()
    medians = {f"{name}_us": statistics.median(each) for name, each in times_us.items()}
    print(json.dumps({**medians, "added_us": medians["on_us"] - medians["off_us"]}))


def _opened(directory: Path, **settings: object) -> EmergencyCheckpointer:
    return EmergencyCheckpointer(
        run_id=directory.name,
        local_dir=str(directory),
        local_save_every=10**9,
        **settings,
    )


if __name__ == "__main__":
    main()
