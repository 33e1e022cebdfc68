"""A process that is killed while another one is in ``save``, and waits for it or for storage."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import Iterator, JobProcess, finish, mesh_of, programs_of, run_program

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage.array_writes import ArrayWrites

VICTIM = 1
WAIT_S = 60.0
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


def killed_while_storage_is_slow(world: JobProcess) -> Any:
    """The survivor alone writes, and storage takes nothing."""
    mesh, iterator = mesh_of(world.slices), Iterator(world.process)
    whole, ones = NamedSharding(mesh, P()), np.ones(WIDTH, np.float32)
    state = {"mean": jax.make_array_from_callback(ones.shape, whole, lambda index: ones[index])}
    is_writing = threading.Event()

    def take_nothing(*_: Any, **__: Any) -> None:
        is_writing.set()
        threading.Event().wait()

    ArrayWrites.write_into = take_nothing
    config = world.config(
        "slow",
        mesh=mesh,
        dir=str(world.root / "slow_steps"),
        save_every=5,
        save_timeout_s=120,
        storage_wait_timeout_s=600,
    )
    with config.instantiate() as ckpt:
        ckpt.save(step=5, state=state, host_state=iterator.at(5))
        if world.process != VICTIM:
            assert is_writing.wait(WAIT_S)
        while not world.named("save.complete"):  # in RAM, which connects the processes
            time.sleep(0.01)
        world.meet()
        if world.process == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.save(step=10, state=state, host_state=iterator.at(10))
        try:
            ckpt.check_for_errors()
        except CheckpointError as error:
            (world.root / "survivor").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    run_program(programs_of(globals()))
