"""Steps that are watched: one process alone has NaN in its part; lives end behind one step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, finish, mesh_of, programs_of, run_program
from restoring import lose

from emergency_ckpt import EmergencyCheckpointer


class _Crash(Exception):
    pass


def _state(world: JobProcess, step: int, bad: int | None = None) -> dict[str, Any]:
    """Return one leaf, split over the processes; ``bad``: the one whose part has a NaN."""
    whole = np.full((world.count, 8), step, np.float32)
    if bad is not None:
        whole[bad, 3] = np.nan
    sharding = NamedSharding(mesh_of(world.slices), P("fsdp"))
    return {"w": jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])}


def _open(world: JobProcess, name: str, **settings: Any) -> EmergencyCheckpointer:
    settings = {"dir": str(world.root / f"{name}.stored"), "save_every": 1, **settings}
    config = world.config(name, mesh=mesh_of(world.slices), local_save_every=1)
    return config.set(**settings).instantiate()


def _restore(world: JobProcess, ckpt: EmergencyCheckpointer, step: int | None = None) -> Any:
    found, state = ckpt.restore(step, state=_state(world, 0))
    mine = np.asarray(state["w"].addressable_shards[0].data)
    return found, float(mine.flat[0])


def _save(world: JobProcess, ckpt: EmergencyCheckpointer, *steps: int, bad: Any = None) -> None:
    for step in steps:
        ckpt.save(step=step, state=_state(world, step, bad))
        finish(ckpt)
    world.meet()


def one_part_is_not_finite(world: JobProcess) -> Any:
    """Process 1 alone has the NaN, and says so; the restored step counts as finite for neither."""

    def told() -> list[int]:
        return [each["step"] for each in world.named("save.non_finite")]

    with _open(world, "parts") as ckpt:
        _save(world, ckpt, 1)
        _save(world, ckpt, 2, 3, bad=1)
        before = told()
    with _open(world, "parts") as ckpt:
        _restore(world, ckpt)
        _save(world, ckpt, 4, bad=1)
        return [before, told()]


def lives_end_behind_one_step(world: JobProcess) -> Any:
    """All RAM is lost after the second life: storage and the ledgers count the same."""
    with _open(world, "lives") as ckpt:
        _save(world, ckpt, 1, 2)
    found: list[Any] = []
    for life in range(5):
        if life == 1:
            lose(world, "lives", *range(world.count))
        try:
            with _open(world, "lives") as ckpt:
                found.append(_restore(world, ckpt)[0])
                world.meet()
                raise _Crash
        except _Crash:
            world.meet()
    return [found, [each["lives"] for each in world.named("restore.suspect")]]


if __name__ == "__main__":
    run_program(programs_of(globals()))
