"""Grain's iterators over restarts with other numbers of processes, by the recipes of the docs.

Each life reads on from what the one before had saved, and says which elements it read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import grain.python as grain
import jax
import numpy as np
from grain.experimental import ElasticIterator
from job_process import JobProcess, finish, mesh_of, programs_of, run_program
from readme_blocks import recipes_of

from emergency_ckpt.tools.job_environment import JobEnvironment

SIZE = 96
GLOBAL_BATCH = 12
ROUNDS = 2
SAVED = 10
"""The step that the first life saves; the later ones save the steps after it."""


def elastic(index: int, count: int) -> Any:
    data = grain.MapDataset.range(SIZE).shuffle(seed=1)
    return iter(ElasticIterator(data, GLOBAL_BATCH, grain.ShardOptions(index, count)))


def sliced(index: int, count: int) -> Any:
    return iter(grain.MapDataset.range(SIZE).shuffle(seed=1)[index::count].to_iter_dataset())


RECIPES = recipes_of("grain_other_size")
KINDS: dict[str, tuple[Callable[[int, int], Any], Any]] = {
    "elastic": (elastic, RECIPES.elastic),
    "sliced": (sliced, RECIPES.sliced),
}


def state_on(world: JobProcess, step: int) -> dict[str, Any]:
    sharding = jax.sharding.NamedSharding(mesh_of(world.slices), jax.sharding.PartitionSpec())
    whole = np.full(8, step, np.float32)
    return {"w": jax.make_array_from_callback((8,), sharding, lambda index: whole[index])}


def _life(world: JobProcess, kind: str, rounds: int | None) -> Any:
    """Restore, if there is something, read ``rounds`` more, or all that is left, and save."""
    build, remap = KINDS[kind]
    iterator = build(world.process, world.count)
    local_dir = JobEnvironment.from_environ().local_dir / kind
    config = world.config(kind, mesh=mesh_of(world.slices), local_dir=str(local_dir))
    config.set(host_state_remap=remap)
    with config.instantiate() as ckpt:
        target = {"data": iterator, "epoch": 0}
        found, state = ckpt.restore(state=state_on(world, 0), host_state=target)
        before = ckpt.last_restore
        read: list[int] = []
        while rounds is None or rounds > 0:
            batch = next(iterator, None)
            if batch is None:
                break
            read += [int(number) for number in np.atleast_1d(batch)]
            rounds = None if rounds is None else rounds - 1
        step = SAVED if found is None else found + 1
        host_state = {"data": iterator, "epoch": step}
        ckpt.save(step=step, state=state_on(world, step), host_state=host_state, force=True)
        finish(ckpt)
        world.meet()
    return {
        "found": found,
        "tier": None if found is None or before is None else before.tier,
        "value": float(np.asarray(state["w"].addressable_data(0))[0]),
        "epoch": target["epoch"],
        "read": read,
    }


def elastic_some(world: JobProcess) -> Any:
    return _life(world, "elastic", ROUNDS)


def elastic_rest(world: JobProcess) -> Any:
    return _life(world, "elastic", None)


def sliced_some(world: JobProcess) -> Any:
    # Processes are not all as far when the step is saved.
    return _life(world, "sliced", ROUNDS + world.process % 2)


def sliced_rest(world: JobProcess) -> Any:
    return _life(world, "sliced", None)


if __name__ == "__main__":
    assert len(sys.argv) > 3, "name the programs"
    run_program(programs_of(globals()))
