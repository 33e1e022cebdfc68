"""The cost of a save and a restore by the number of leaves, in one process on CPU.

    python -m benchmarks.micro.many_leaves --leaves 16 2000 20000 --devices 1

Each round consumes the state in a training step, then saves it, so nothing of a leaf is cached from
round to round. Figures are medians over the rounds. CPU time, which other work on the machine
changes least, is that of the training thread for ``save``, and that of the whole process for the
rest. Needs a tmpfs at /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.common.arguments import positive
from emergency_ckpt import EmergencyCheckpointer

PyTree = Any


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print one line of JSON for each number of leaves."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.micro.many_leaves", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--leaves", type=positive, nargs="+", default=(16, 2000, 20_000))
    parser.add_argument("--leaf-bytes", type=positive, default=4096)
    parser.add_argument("--devices", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--replicated", action="store_true", help="each leaf whole on every device, not divided"
    )
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", options.devices)
    for leaves in options.leaves:
        state = new_state(leaves, options.leaf_bytes, options.dtype, replicated=options.replicated)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            found = measure(Path(root), state, options.rounds)
        place = {
            "leaves": leaves,
            "devices": options.devices,
            "dtype": options.dtype,
            "replicated": options.replicated,
        }
        print(json.dumps({**place, **found}), flush=True)
    return 0


def new_state(leaves: int, leaf_bytes: int, dtype: str, *, replicated: bool) -> PyTree:
    """Return arrays of ``leaf_bytes``, each divided over all devices or whole on every one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spec = jax.sharding.PartitionSpec(None if replicated else "x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    row = jax.device_count()
    values = np.ones((row, max(1, leaf_bytes // row // jax.numpy.dtype(dtype).itemsize)), dtype)
    return {
        f"layer_{number:05}": {"kernel": jax.device_put(values, sharding)}
        for number in range(leaves)
    }


def _spec_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


# All leaves are alike. A program of thousands of them would compile for minutes.
@jax.jit(donate_argnums=0)
def _step(leaf: jax.Array) -> jax.Array:
    return leaf + 1


def measure(root: Path, state: PyTree, rounds: int) -> dict[str, float]:
    """Return medians: microseconds of CPU time per leaf, and milliseconds of ``save``."""
    like = jax.tree.map(_spec_of, state)
    count = len(jax.tree.leaves(state))
    times: dict[str, list[float]] = {}
    with _opened(root) as checkpointer:
        checkpointer.restore(state=like)
        for step in range(rounds + 1):
            state = jax.block_until_ready(jax.tree.map(_step, state))
            process_s, thread_s, begun_s = time.process_time(), time.thread_time(), time.monotonic()
            checkpointer.save(step=step, state=state)
            stall_s, stall_cpu_s = time.monotonic() - begun_s, time.thread_time() - thread_s
            checkpointer.wait_until_finished()
            whole_s, cpu_s = time.monotonic() - begun_s, time.process_time() - process_s
            checkpointer.check_for_errors()
            if step:  # the first save also builds the plan
                _add(times, "stall_ms", stall_s * 1e3)
                _add(times, "stall_cpu_us_per_leaf", stall_cpu_s / count * 1e6)
                _add(times, "published_ms", whole_s * 1e3)
                _add(times, "background_cpu_us_per_leaf", (cpu_s - stall_cpu_s) / count * 1e6)
            else:
                _add(times, "first_stall_ms", stall_s * 1e3)
    del state
    for _ in range(min(rounds, 3)):
        with _opened(root) as checkpointer:
            process_s, begun_s = time.process_time(), time.monotonic()
            found, restored = checkpointer.restore(state=like)
            jax.block_until_ready(restored)
            _add(times, "restore_ms", (time.monotonic() - begun_s) * 1e3)
            _add(times, "restore_cpu_us_per_leaf", (time.process_time() - process_s) / count * 1e6)
            assert found == rounds, found
            del restored
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def _add(times: dict[str, list[float]], name: str, value: float) -> None:
    times.setdefault(name, []).append(value)


def _opened(root: Path) -> EmergencyCheckpointer:
    return EmergencyCheckpointer(run_id="leaves", local_dir=str(root), local_save_every=1)


if __name__ == "__main__":
    raise SystemExit(main())
