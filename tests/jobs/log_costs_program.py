"""What a bucket is asked in a directory of many steps. Prints a line of JSON for each word read.

python log_costs_program.py gs://bucket/run RAMDISK STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "support"), str(_ROOT / "verification")]

# ruff: noqa: E402 - these import what the lines above must precede

import msgspec
from world import World, finish

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.step_log import Table
from emergency_ckpt.storage import PersistentTier

REAL = 3
"""Steps that are there in full; of those before them its reader adds a name to each listing."""


def fill(world: World, directory: str, steps: int) -> list[int]:
    """Leave a log of ``steps`` steps, the newest of which are whole; return the others."""
    with open_it(world, directory) as ckpt:
        for step in range(steps - REAL + 1, steps + 1):
            ckpt.save(step=step, state=world.state(step))
            ckpt.wait_until_finished()
        ckpt.check_for_errors()
    tier = PersistentTier(directory)
    read = tier.found.log.read()
    assert read.table is not None
    (first, *_) = read.table.steps
    older = [msgspec.structs.replace(first, step=step) for step in range(1, first.step)]
    table: Table = msgspec.structs.replace(
        read.table, number=read.number + 1, steps=(*older, *read.table.steps)
    )
    assert tier.found.log.append(table)
    return [entry.step for entry in older]


def open_it(world: World, directory: str, **settings: Any) -> EmergencyCheckpointer:
    return world.open(
        dir=directory,
        save_every=1,
        local_save_every=0,
        require={"storage"},  # the test of storage is over when the start is
        storage_wait_timeout_s=600.0,
        **settings,
    )


def main(directory: str, ramdisk: str, steps: int) -> None:
    world = World(Path(ramdisk))
    older = fill(world, directory, steps)
    world.lose_ram()
    print(json.dumps({"older": older}), flush=True)
    ckpt: EmergencyCheckpointer | None = None
    for line in sys.stdin:
        match line.strip():
            case "start":
                ckpt = open_it(world, directory)
                found = None
            case "restore":
                assert ckpt is not None
                found = ckpt.restore(state=world.state(0))[0]
            case "first save" | "second save" as which:
                assert ckpt is not None
                found = steps + 1 + (which == "second save")
                ckpt.save(step=found, state=world.state(found))
                finish(ckpt)
            case "removal":
                assert ckpt is not None
                found = ckpt.steps.remove(steps)
            case "latest_step":
                assert ckpt is not None
                found = ckpt.latest_step()
            case "stop":
                assert ckpt is not None
                found = ckpt.stop()
            case word:
                raise ValueError(word)
        print(json.dumps({"found": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
