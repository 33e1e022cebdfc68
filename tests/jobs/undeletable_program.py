"""Lives that save in a bucket where nothing can be deleted; prints what each did, as JSON.

python undeletable_program.py CASE
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# ruff: noqa: E402 - these import what the lines above must precede

from fake_gcs import FaultRule, GcsControl
from world import STORAGE, World, finish, same, save

from emergency_ckpt.errors import CheckpointError

RUN = "gs://bucket/run"
AHEAD = ((None, (2, 4)), (None, (6, 8)), (None, (10, 12)))
BACK = ((None, (2, 4)), (2, (3,)), (None, (4, 6)), (None, (8,)))


class Case(NamedTuple):
    """``lives``: the step that each asks for, and those that it saves.

    ``refused_from``: the first life whose deletions are refused.
    """

    lives: Sequence[tuple[int | None, Sequence[int]]]
    refused_from: int = 0
    settings: Mapping[str, Any] = {}


CASES = {
    "keep_last_n": Case(AHEAD, settings={"keep_last_n": 1}),
    "failed_save": Case(AHEAD),
    "hidden": Case(BACK, refused_from=2),
    "rollback": Case(BACK),
}


def live(
    world: World, case: str, asked: int | None, steps: Sequence[int], control: GcsControl
) -> dict[str, Any]:
    """A life that restores, and saves ``steps``; what it completed, and what it was told."""
    shutil.rmtree(world.ramdisk, ignore_errors=True)
    world.events.clear()
    errors: list[str] = []
    with world.open(dir=RUN, **STORAGE, **CASES[case].settings) as ckpt:
        found, state = ckpt.restore(asked, state=world.state(0))
        for step in steps:
            lost = FaultRule(kind="status", status_code=403, target=f"bucket/run/{step}/state/d/*")
            if case == "failed_save" and step == 2:
                control.add_fault(lost)
            save(ckpt, world, step, force=True)
            try:
                finish(ckpt)
            except CheckpointError as error:
                errors.append(str(error))
    named = {name: [] for name in ("persistent.complete", "persistent.failed")}
    for event in world.events:
        if event.name in named:
            named[event.name].append(event.fields["step"])
    return {
        "restored": found,
        "same": found is None or same(state, world.state(found)),
        "complete": named["persistent.complete"],
        "failed": named["persistent.failed"],
        "kept": [e.fields["reason"] for e in world.named("persistent.removal", stage="failed")],
        "errors": errors,
    }


def main(case: str) -> list[dict[str, Any]]:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    refused = FaultRule(kind="status", status_code=403, method="DELETE")
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    try:
        world = World(root)
        lives: list[dict[str, Any]] = []
        for index, (asked, steps) in enumerate(CASES[case].lives):
            if index == CASES[case].refused_from:
                control.add_fault(refused)
            lives.append(live(world, case, asked, steps, control))
        return lives
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
