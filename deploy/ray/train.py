"""A JaxTrainer whose workers keep their checkpoints in RAM. Copy it; change the marked places."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

from emergency_ckpt import EmergencyCheckpointer


class Batches:
    """Your data iterator: anything with ``get_state`` and ``set_state``."""

    def __init__(self, process: int) -> None:
        self._process, self._position = process, 0

    def get_state(self) -> dict[str, int]:
        return {"position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def __next__(self) -> np.ndarray[Any, Any]:
        self._position += 1
        return np.random.default_rng([self._process, self._position]).normal(size=(8, 16))


def train_step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """Your train step."""
    return weights - 0.01 * jax.grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)


def train(config: dict[str, Any]) -> None:
    """One worker: ``jax.distributed`` runs already. ``config`` as in ``main``."""
    mesh = Mesh(np.array(jax.devices()), ("slice",))
    split = NamedSharding(mesh, PartitionSpec("slice"))
    weights = jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec()))
    data, step_of = Batches(jax.process_index()), jax.jit(train_step, donate_argnums=0)
    # A directory for each Ray node, since several may share a host.
    local_dir = Path(config["ramdisk"], ray.get_runtime_context().get_node_id())
    local_dir.mkdir(parents=True, exist_ok=True)
    settings = EmergencyCheckpointer.default_config().set(
        run_id=config["run_id"],
        dir=config.get("dir"),  # the persistent tier, such as gs://bucket/run7
        local_dir=str(local_dir),
        mesh=mesh,
        replica_axis="slice",
        local_save_every=config["save_every"],
        preemption_notice="ray",
        hang_timeout_s=300.0,
        require={"peers"},
        on_event=config.get("on_event"),
    )
    with settings.instantiate() as ckpt:
        found, weights = ckpt.restore(state=weights, host_state=data)
        for step in range((found or 0) + 1, config["last_step"] + 1):
            batch = jax.make_array_from_process_local_data(split, next(data))
            weights = step_of(weights, batch)
            ckpt.save(step=step, state=weights, host_state=data)
            config.get("after_step", print)(step)
            if ckpt.reached_preemption(step):
                ckpt.wait_until_finished()
                # A loop that returns is finished for Ray; one that raises is started again.
                raise RuntimeError(f"preempted; step {step} is saved")
    config.get("at_end", print)(np.asarray(weights), data.get_state())


def trainer(config: dict[str, Any], workers: int, storage_path: str) -> JaxTrainer:
    """Return a trainer with one worker for each of ``workers`` nodes."""
    return JaxTrainer(
        train,
        train_loop_config=config,
        jax_config=JaxConfig(use_gpu=True),  # use_tpu=True on TPU
        scaling_config=ScalingConfig(
            num_workers=workers,
            resources_per_worker={"CPU": 0.9},  # on TPU: use_tpu, topology, accelerator_type
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=config["run_id"],
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=3),
        ),
    )


def main() -> None:
    """``train.py WORKERS STORAGE_PATH``, on the head node."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    ray.init(address="auto")
    config = {
        "run_id": "run7",
        "ramdisk": "/dev/shm/eckpt",  # noqa: S108 - a tmpfs on every node
        "save_every": 10,
        "last_step": 1000,
    }
    trainer(config, int(sys.argv[1]), sys.argv[2]).fit()


if __name__ == "__main__":
    main()
