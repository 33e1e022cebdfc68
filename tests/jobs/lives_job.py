"""Lives of one run on other hosts, under other numbers, in other shapes.

A world is a directory on each host's ramdisk; the test copies it before each life, without the
hosts that are lost. All are of one run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from job_process import (
    Iterator,
    JobProcess,
    differences,
    finish,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)
from restarts import RUN_ID

from emergency_ckpt import CheckpointerConfig
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment

STEPS = 100


def config_in(world: JobProcess, name: str, **settings: Any) -> CheckpointerConfig:
    """The ramdisk of this host, whatever number its process has now."""
    local_dir = JobEnvironment.from_environ().local_dir / name
    settings = {"run_id": RUN_ID, "local_dir": str(local_dir), **settings}
    return world.config(name, **settings)


def train(world: JobProcess) -> None:
    """Train in the world ``base`` until somebody ends it: saves are complete when reported."""
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    with config_in(world, "base", mesh=mesh).instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in range(1, STEPS):
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
            finish(ckpt)
            report_step(step)


def restore(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    mesh = settings.setdefault("mesh", mesh_of(world.slices))
    stateless = settings.pop("stateless", False)
    iterator = Iterator(-1)
    try:
        with config_in(world, name, **settings).instantiate() as ckpt:
            host_state = None if stateless else iterator
            step, state = ckpt.restore(state=specs_on(mesh), host_state=host_state)
            world.meet()
    except CheckpointError as error:
        world.meet()
        untouched = (iterator.process, iterator.position) == (-1, 0)
        return {"error": type(error).__name__, "text": str(error), "untouched": untouched}
    assert step is not None
    assert ckpt.last_restore is not None
    return {
        "step": step,
        "tier": ckpt.last_restore.tier,
        "differences": differences(state, step, mesh),
        "iterator": [iterator.process, iterator.position],
        "local": ckpt.last_restore.bytes_local,
        "peer": ckpt.last_restore.bytes_peer,
    }


def first_of_the_old(payloads: Sequence[Any], process: int, count: int) -> Any:
    """A remap: each process goes on where the process with its number times two had been."""
    assert count * 2 == len(payloads)
    return payloads[2 * process]


def after_drain(world: JobProcess) -> Any:
    """All RAM is lost; ``eckpt drain`` was run on the hosts of one slice."""
    return restore(world, "after_drain", dir=str(world.root / "drained"))


def without_host_state(world: JobProcess) -> Any:
    return restore(world, "without_host_state", stateless=True)


def with_host_state(world: JobProcess) -> Any:
    """No remap is an error that changes nothing; with one it works."""
    refused = restore(world, "with_host_state")
    return [refused, restore(world, "with_host_state", host_state_remap=first_of_the_old)]


def primary_is_another_slice(world: JobProcess) -> Any:
    """The mesh begins with another slice than that of process 0; all RAM is lost between."""
    mesh = mesh_of(world.slices, [*range(1, world.slices), 0])
    settings = {
        "dir": str(world.root / "persistent"),
        "save_every": 5,
        "mesh": mesh,
        "run_id": "other",
    }
    iterator = Iterator(world.process)
    with config_in(world, "saved", **settings).instantiate() as ckpt:
        state = {**state_at(5, mesh), **of_one_process()}
        ckpt.save(step=5, state=state, host_state=iterator.at(5))
        finish(ckpt)
        world.meet()
    with config_in(world, "empty", **settings).instantiate() as ckpt:
        zeros = jax.tree.map(jnp.zeros_like, of_one_process())
        like = {**specs_on(mesh), **zeros}
        iterator = Iterator(-1)
        step, state = ckpt.restore(state=like, host_state=iterator)
        world.meet()
    assert ckpt.last_restore is not None
    own = {name: state.pop(name) for name in of_one_process()}
    return {
        "step": step,
        "tier": ckpt.last_restore.tier,
        "differences": differences(state, 5, mesh),
        "own": {name: np.asarray(value).tolist() for name, value in own.items()},
        "iterator_right": iterator.is_at(5, world.process),
    }


def of_one_process() -> dict[str, Any]:
    """Arrays that each process made for itself, equal on all: optimizers count with these."""
    return {"counter": jnp.int32(7), "scale": jnp.arange(3.0)}


WORLDS = (
    *("everything_kept", "a_host_lost", "a_slice_lost", "both_slices_half_lost"),
    "two_slices_lost",
)
PROGRAMS = programs_of(globals()) | {name: functools.partial(restore, name=name) for name in WORLDS}

if __name__ == "__main__":
    assert len(sys.argv) > 3, "name the programs: train does not end by itself"
    run_program(PROGRAMS)
