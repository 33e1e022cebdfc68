"""Restores from a bucket, in each of which another reply has one wrong bit; prints them as JSON."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# ruff: noqa: E402 - these import what the lines above must precede

from fake_gcs import FaultRule, GcsControl
from world import STORAGE, World, logged, same, save_all

STEPS = (2, 4)
RUN = "gs://bucket/run"
NTH = range(2)
"""The reads of each object that are wrong, in turn: of data the first has nodes of the database."""


def restore(world: World) -> dict[str, Any]:
    """Restore in a new life without RAM; return what came."""
    shutil.rmtree(world.ramdisk, ignore_errors=True)
    position: dict[str, int] = {}
    with logged() as lines, world.open(dir=RUN, **STORAGE) as ckpt:
        step, state = ckpt.restore(state=world.state(0), host_state=position)
    return {
        "step": step,
        "same": step is not None and same(state, world.state(step)),
        "at": position.get("at"),
        "is_told": any("a second read of it was good" in line for line in lines),
    }


def main(objects: list[str]) -> dict[str, dict[str, Any]]:
    """``objects``: below the run; each is spoiled in turn."""
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    found: dict[str, dict[str, Any]] = {}
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    try:
        world = World(root)
        with world.open(dir=RUN, **STORAGE) as ckpt:
            save_all(ckpt, world, *STEPS)
        for name, nth in itertools.product(objects, NTH):
            target = f"bucket/run/{name}"
            rule = FaultRule(
                kind="flip", operation="objects.media", target=target, skip=nth, count=1
            )
            with control.fault(rule):
                result = restore(world)
                if control.fault_states()[0].hit:
                    found[f"{name} {nth}"] = result
        return found
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
