"""A process that is killed while the arrays of the others wait for it in a collective."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import Iterator, JobProcess, finish, mesh_of, run_program

from emergency_ckpt.errors import CheckpointError

VICTIM = 1
WIDTH = 1 << 18
"""JAX computes smaller arrays on CPU in the thread that asks for them."""


def killed_before_a_collective(world: JobProcess) -> Any:
    """No process has had a collective before, so none has an error of its own to tell."""
    mesh = mesh_of(world.slices)
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("slice"))
    ones = np.ones((world.slices, WIDTH), np.float32)
    batch = jax.make_array_from_callback(ones.shape, parts, lambda index: ones[index])
    mean = jax.make_array_from_callback((WIDTH,), whole, lambda index: ones[0][index[0]])
    step_of = jax.jit(lambda batch: jnp.mean(batch, 0), out_shardings=whole).lower(batch).compile()
    iterator = Iterator(world.process)
    config = world.config("killed", mesh=mesh, save_timeout_s=120)
    with config.instantiate() as ckpt:
        ckpt.save(step=5, state={"mean": mean}, host_state=iterator.at(5))
        finish(ckpt)
        if world.process == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ckpt.save(step=10, state={"mean": step_of(batch)}, host_state=iterator.at(10))
        except CheckpointError as error:
            # The program of the survivor does not end: JAX waits for the dead one at its end.
            (world.root / "survivor").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    run_program({killed_before_a_collective.__name__: killed_before_a_collective})
