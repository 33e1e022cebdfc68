"""One process of the study: ``python worker.py ORDERS.json``.

The benchmark starts it. It trains for the ordered steps, calls ``save`` after each, and records
when each step ended and when each save was complete. The state restored at the end must equal the
saved one.
"""

import json
import os
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.common import state as model
from benchmarks.continuous.checkpointers import Ours, PlainOrbax, Watch
from benchmarks.continuous.study import OFF, ORBAX_CONTINUOUS, Orders
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

PyTree = Any


def main(orders: Orders) -> None:
    environment = JobEnvironment.from_environ()
    every_core = os.sched_getaffinity(0)
    training_cores = set(sorted(every_core)[: orders.training_cores])
    # A thread may run where the one that started it may: this one, and XLA's from here on.
    os.sched_setaffinity(0, training_cores)
    initialize_job(environment)
    mesh = model.make_mesh(orders.shape)
    abstract = model.abstract_state(orders.shape, mesh)
    watch = Watch()
    kind = PlainOrbax if orders.variant == ORBAX_CONTINUOUS else Ours
    os.sched_setaffinity(0, every_core)
    with closing(kind(orders, environment, mesh, abstract, watch)) as checkpointer:
        os.sched_setaffinity(0, training_cores)
        ended_s = _train(orders, checkpointer, watch, abstract, mesh)
        os.sched_setaffinity(0, every_core)
        checkpointer.wait()
        restored_step = None
        if orders.variant != OFF:
            restored_step = _check_restored(checkpointer, abstract)
        multihost_utils.sync_global_devices("study ended")
    result = {
        "ended_s": ended_s,
        "called_s": {step: t for step, t in watch.called_s.items() if step in watch.whole_s},
        "whole_s": watch.whole_s,
        "lost": watch.lost,
        "restored_step": restored_step,
    }
    orders.result_path(environment.process_index).write_text(json.dumps(result))
    jax.distributed.shutdown()


def _train(
    orders: Orders,
    checkpointer: Ours | PlainOrbax,
    watch: Watch,
    abstract: PyTree,
    mesh: jax.sharding.Mesh,
) -> list[float]:
    """Return the time at which warm-up ended, followed by the end of each later step."""
    state = _whole_numbers(model.first_state(abstract))
    meet = _meeting(mesh)
    ended_s = []
    last = orders.warm_up_steps + orders.measured_steps
    for step in range(1, last + 1):
        state = _train_step(state)
        jax.block_until_ready(state)
        meet()
        watch.called_s[step] = time.monotonic()
        checkpointer.save(step, state)
        # As after dispatching a step to an accelerator, which works on it meanwhile.
        time.sleep(orders.device_s)
        if step >= orders.warm_up_steps:
            ended_s.append(time.monotonic())
    return ended_s


def _meeting(mesh: jax.sharding.Mesh) -> Any:
    """Return a function that sums one number per device, so that all devices wait for the last."""
    everyone = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    alike = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ones = jax.make_array_from_callback(
        (mesh.size,), everyone, lambda index: np.ones(mesh.size, np.float32)[index]
    )
    add = jax.jit(lambda x: x.sum(), out_shardings=alike)
    return lambda: jax.block_until_ready(add(ones))


@jax.jit(donate_argnums=0)
def _whole_numbers(state: PyTree) -> PyTree:
    """Return whole numbers, so that adding 1 at each step stays exact in float32."""
    return jax.tree.map(lambda x: (x * 1000).round(), state)


@jax.jit(donate_argnums=0)
def _train_step(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x + 1, state)


def _check_restored(checkpointer: Ours | PlainOrbax, abstract: PyTree) -> int:
    """Return the restored step. RuntimeError unless every value equals that step's."""
    step, state = checkpointer.restore()
    if step is None:
        raise RuntimeError("nothing was saved that can be restored")
    first = _whole_numbers(model.first_state(abstract))
    for name, array in first.items():
        pairs = zip(array.addressable_shards, state[name].addressable_shards, strict=True)
        for was, found in pairs:
            if not np.array_equal(np.asarray(was.data) + step, np.asarray(found.data)):
                raise RuntimeError(f"{name} {was.index} is not what step {step} had")
    return step


if __name__ == "__main__":
    try:
        main(Orders.read(Path(sys.argv[1])))
    except Exception:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX's way out would wait for the others, who wait for this process
