"""A stored value changed on its way back, where no codec notices; ``test_rotten_storage.py``."""

from __future__ import annotations

from typing import Any

import tensorstore
from job_process import JobProcess, mesh_of, programs_of, run_program
from restoring import lose, restore, train

SAVES_TO_RAM = {"local_save_every": 5}
"""Of a life that keeps in RAM what it has restored."""


def settings_of(world: JobProcess, name: str) -> dict[str, Any]:
    return {
        "dir": str(world.root / f"storage_{name}"),
        "save_every": 5,
        "local_save_every": 0,
    }


def train_and_rot(world: JobProcess, name: str) -> None:
    """Steps 5 and 10 are in storage, no RAM is left, and one value of step 10 is another."""
    settings = settings_of(world, name)
    train(world, name, range(1, 11), **settings)
    lose(world, name, 0, 1)
    if world.process == 0:
        item = f"file://{settings['dir']}/10/state/"
        store = {"driver": "ocdbt", "base": item, "path": "embed/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True).result()
        array[31, 15].write(1.5).result()
    world.meet()


def same_mesh(world: JobProcess) -> Any:
    train_and_rot(world, "same")
    more = settings_of(world, "same") | SAVES_TO_RAM
    return [restore(world, "same", **more) for _ in range(2)]


def other_mesh(world: JobProcess) -> Any:
    train_and_rot(world, "other")
    more = settings_of(world, "other") | SAVES_TO_RAM
    return [restore(world, "other", mesh=mesh_of(1), **more) for _ in range(2)]


if __name__ == "__main__":
    run_program(programs_of(globals()))
