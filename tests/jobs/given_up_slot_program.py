"""A write to a bucket is given up while it sends the bytes of a slot, and local saves go on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.events import Event
from emergency_ckpt.storage.array_writes import ArrayWrites

WAIT_S = 120.0
STEP, LATER, LAST = 2, (3, 5, 7, 9), 10
VALUES = 4 << 20
DATA = f"bucket/run/{STEP}/state/*d/*"


def state_of(step: int) -> dict[str, Any]:
    return {"x": jax.numpy.asarray(bits_of(step))}


def bits_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 1 << 32, VALUES, np.uint32)


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def main(local_dir: str) -> None:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    events: list[Event] = []
    writes: list[ArrayWrites] = []
    begin = ArrayWrites.write_into

    def note_and_begin(own: ArrayWrites, *args: Any) -> None:
        writes.append(own)
        begin(own, *args)

    ArrayWrites.write_into = note_and_begin

    def slots() -> int:
        return len(list(Path(local_dir).rglob("slot_*.bin")))

    with EmergencyCheckpointer(
        dir="gs://bucket/run",
        local_dir=local_dir,
        local_save_every=1,
        save_every=2,
        on_event=events.append,
    ) as ckpt:
        ckpt.restore(state=state_of(0))
        rule = control.add_fault(
            FaultRule(kind="trickle", bytes_per_s=1 << 17, method="POST", target=DATA)
        )
        ckpt.save(step=STEP, state=state_of(STEP))
        wait_for(lambda: any(each.rule_id == rule and each.hit for each in control.fault_states()))
        writes[0].cancel()
        ckpt.wait_until_finished()
        assert ckpt.failed_saves == 1
        for step in LATER:
            ckpt.save(step=step, state=state_of(step))
            ckpt.wait_until_finished()
        found = {"slots": slots()}
        control.remove_fault(rule)
        wait_for(lambda: any(_is_data(each) for each in control.requests()))
        (name,) = [each for each in control.object_names("bucket", f"run/{STEP}/") if "/d/" in each]
        found["is_step"] = bits_of(STEP).tobytes() in control.object_bytes("bucket", name)
        ckpt.save(step=LAST, state=state_of(LAST))
        ckpt.wait_until_finished()
        found["failed"] = ckpt.failed_saves
    found["sources"] = [
        e.fields["source"] for e in events if e.point == "persistent.stage.captured"
    ]
    print(json.dumps(found))


def _is_data(request: Any) -> bool:
    return f"/run/{STEP}/" in f"/{request.target}" and "/d/" in request.target


if __name__ == "__main__":
    main(sys.argv[1])
