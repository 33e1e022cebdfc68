"""A training loop for ``train.sbatch``: one process on each node, or for each GPU."""

from __future__ import annotations

import argparse
import time
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.extras.hang import HangWatch

PREEMPTED = 143


def parse_arguments() -> argparse.Namespace:
    """Return the options. ``train.sbatch`` gives those without a default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="persistent tier, on storage of all nodes")
    parser.add_argument("--local-dir", required=True, help="local tier, on this node's tmpfs")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local-every", type=int, default=2)
    parser.add_argument("--persistent-every", type=int, default=50)
    parser.add_argument("--hang-timeout-s", type=float, default=600.0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="makes this toy's steps longer")
    return parser.parse_args()


def train(options: argparse.Namespace) -> tuple[Any, Any]:
    """Train to the last step; return the state and this process's data iterator. Collective."""
    jax.distributed.initialize()  # finds its place in the environment of srun
    mesh = Mesh(np.array(jax.devices()).reshape(options.slices, -1), ("slice", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    state = {"w": jax.ShapeDtypeStruct((options.width,), jnp.float32, sharding=sharding)}
    batch_sharding = NamedSharding(mesh, PartitionSpec(("slice", "fsdp")))
    shard = slice(jax.process_index(), None, jax.process_count())
    data = iter(grain.MapDataset.range(10_000).seed(0).shuffle()[shard].repeat().to_iter_dataset())

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, batch: jax.Array) -> Any:
        return {"w": 0.9 * state["w"] + jnp.sin(batch).sum()}

    config = EmergencyCheckpointer.default_config().set(
        dir=options.dir,
        local_dir=options.local_dir,
        run_id=options.run_id,
        secret_file=options.secret_file,
        mesh=mesh,
        replica_axis="slice",
        local_save_every=options.local_every,
        save_every=options.persistent_every,
        on_event=HangWatch(options.hang_timeout_s),
        require={"secret", "peers"},
    )
    with config.instantiate() as ckpt:
        done, state = ckpt.restore(state=state, host_state=data)
        print(f"process {jax.process_index()}: start after step {done}", flush=True)
        if done is None:
            state = {"w": jnp.zeros(options.width, device=sharding)}
        for step in range((done or 0) + 1, options.steps + 1):
            # One number for each device of this process.
            numbers = np.full(jax.local_device_count(), next(data), np.float32)
            batch = jax.make_array_from_process_local_data(batch_sharding, numbers)
            state = train_step(state, batch)
            ckpt.save(step=step, state=state, host_state=data)
            jax.block_until_ready(state)
            print(f"process {jax.process_index()}: step {step}", flush=True)
            if ckpt.reached_preemption(step):  # SIGTERM, or the end of the allocation
                ckpt.wait_until_finished()
                raise SystemExit(PREEMPTED)
            time.sleep(options.pause_s)
        ckpt.save(step=options.steps, state=state, host_state=data, force=True)
    return state, data


if __name__ == "__main__":
    train(parse_arguments())
