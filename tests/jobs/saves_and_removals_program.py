"""Saves without a pause while old steps are removed; ``test_saves_beside_removals.py`` judges."""

from __future__ import annotations

import json
import sys
import tempfile

import numpy as np
from configs import config_with

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.events import Event

KEPT = 3
LONG_S = 120.0


def save_and_remove(directory: str, local_dir: str, saves: int) -> dict[str, object]:
    """Return the outcome of ``saves`` saves to ``directory``; the last three are kept."""
    events: list[Event] = []
    settings = {
        "dir": directory,
        "local_dir": local_dir,
        "local_save_every": 0,
        "save_every": 1,
        "keep_last_n": KEPT,
        "storage_wait_timeout_s": LONG_S,
        "on_event": events.append,
    }
    with EmergencyCheckpointer(config_with(settings)) as ckpt:
        for step in range(1, saves + 1):
            ckpt.save(step=step, state={"w": np.full(4, step), "b": np.zeros(2)})
        ckpt.wait_until_finished()
        failed = [event.fields for event in events if event.name == "persistent.failed"]
        removed = sum(event.point == "persistent.removal.removed" for event in events)
        return {
            "failed": failed[:3],
            "failures": ckpt.failed_saves,
            "removed": removed,
            "steps": ckpt.all_steps(),
        }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as ram:
        print(json.dumps(save_and_remove(sys.argv[1], ram, int(sys.argv[2]))))
