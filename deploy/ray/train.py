"""A JaxTrainer whose workers keep their checkpoints in RAM. Copy it; change the marked places."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
import ray.train
from fsspec.implementations.arrow import ArrowFSWrapper
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pyarrow.fs import FileInfo, FileSystem, FileType, FSSpecHandler, PyFileSystem
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from emergency_ckpt import EmergencyCheckpointer, Event
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.hang import HangWatch

STEPS = "steps"
"""Folder of the persistent tier in Ray's folder of the run; Ray takes no other checkpoints."""


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


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Your train step; returns the new state and the loss."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)
    return weights - 0.01 * gradient, loss


class Reports:
    """Tells Ray which step storage has complete, with the metrics that it was saved with.

    ``ray.train.report`` waits for all workers, so all call ``tell`` at the same steps. They hear at
    different times that a save is complete, so worker 0 alone names the step. Nothing is copied.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self._metrics: dict[int, dict[str, float] | None] = {}
        self._complete: int | None = None
        known = ray.train.get_checkpoint()
        self._told = None if known is None else int(PurePosixPath(known.path).name)

    def on_event(self, event: Event) -> None:
        """Note that storage has a step; called in a thread of the checkpointer."""
        if event.name == "persistent.complete":
            self._complete = int(str(event.fields["step"]))
        if self._on_event is not None:
            self._on_event(event)

    def begin(self, ckpt: EmergencyCheckpointer, state: jax.Array) -> None:
        """Tell what an earlier life saved and could not tell. Collective."""
        stored = ckpt.steps.survey(state).persistent
        if stored and not ray.train.get_context().get_world_rank():
            self._complete = stored[-1]
            self._metrics[stored[-1]] = dict(ckpt.steps.describe(stored[-1]).metrics or {})
        self.tell()

    def saved(self, step: int, metrics: dict[str, float] | None) -> None:
        """Keep ``metrics`` until storage has the step."""
        if metrics is not None:
            self._metrics[step] = metrics

    def tell(self) -> None:
        """Report the newest step that storage has, unless Ray knows it. Collective; blocks."""
        step, context = self._complete, ray.train.get_context()
        if context.get_world_rank() or step is None or step == self._told:
            ray.train.report({})
            return
        metrics = self._metrics.get(step) or {}
        self._metrics = {each: kept for each, kept in self._metrics.items() if each > step}
        self._told, storage = step, context.get_storage()
        path = f"{storage.experiment_fs_path}/{STEPS}/{step}"
        ray.train.report(
            {"step": step, **metrics},
            checkpoint=ray.train.Checkpoint(path, storage.storage_filesystem),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


def local_dir() -> str:
    """Return a tmpfs of this node, the same after a restart of Ray there."""
    return os.environ.get("ECKPT_LOCAL_DIR", "/dev/shm/eckpt")  # noqa: S108


def train(config: dict[str, Any]) -> None:
    """One worker: ``jax.distributed`` runs already. ``config`` as in ``main`` and ``trainer``."""
    mesh = Mesh(np.array(jax.devices()), ("slice",))
    split = NamedSharding(mesh, PartitionSpec("slice"))
    weights = jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec()))
    data, step_of = Batches(jax.process_index()), jax.jit(train_step, donate_argnums=0)
    reports = Reports(config.get("on_event"))
    settings = EmergencyCheckpointer.default_config().set(
        run_id=config["run_id"],
        dir=config["dir"],
        local_dir=local_dir(),
        secret_file=config["secret_file"],
        mesh=mesh,
        replica_axis="slice",
        local_save_every=config["save_every"],
        save_every=config["store_every"],
        keep_last_n=config["keep_last_n"],
        require={"peers", "secret"},
        on_event=[reports.on_event, HangWatch(300.0), "notices(ray)"],
    )
    with settings.instantiate() as ckpt:
        found, weights = ckpt.restore(state=weights, host_state=data)
        reports.begin(ckpt, weights)
        for step in range((found or 0) + 1, config["last_step"] + 1):
            batch = jax.make_array_from_process_local_data(split, next(data))
            weights, loss = step_of(weights, batch)
            is_last = step == config["last_step"]
            is_stored = is_last or step % config["store_every"] == 0
            metrics = {"loss": float(loss)} if is_stored else None
            if is_stored:
                reports.tell()  # by now storage has the step before
            ckpt.save(step=step, state=weights, host_state=data, force=is_last, metrics=metrics)
            reports.saved(step, metrics)
            config.get("after_step", print)(step)
            is_preempted = ckpt.reached_preemption(step)
            if is_last or is_preempted:
                ckpt.wait_until_finished()
                reports.tell()
            if is_preempted and not is_last:
                # A loop that returns is finished for Ray; one that raises is started again.
                raise RuntimeError(f"preempted; step {step} is saved")
    config.get("at_end", print)(np.asarray(weights), data.get_state())


class StepsStay(FSSpecHandler):
    """Ray's storage, in which Ray neither removes a step nor misses one.

    The checkpointer removes steps, after its log says so. Ray hears of that seconds later, and
    would end the run for a step in its list that is gone, as it would refuse to start it again.
    """

    def delete_dir(self, path: str) -> None:
        """Remove a folder that is no step."""
        if not is_step(path):
            super().delete_dir(path)

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        """Return what there is, and a folder for every step."""
        found = zip(paths, super().get_file_info(paths), strict=True)
        return [FileInfo(p, FileType.Directory) if is_step(p) else info for p, info in found]


def is_step(path: str) -> bool:
    """Return whether ``path`` is that of a step."""
    return PurePosixPath(path).parent.name == STEPS


def kept_steps(checkpoints: CheckpointConfig) -> int | None:
    """Return ``keep_last_n`` for what Ray is to keep.

    Raises:
      ConfigError: a choice by score, which the checkpointer would not make.
    """
    scored = checkpoints.checkpoint_score_attribute is not None
    if checkpoints.num_to_keep is not None and scored:
        problem = (
            "checkpoint_score_attribute together with num_to_keep; leave num_to_keep out, and set"
            " preservation_policy of the checkpointer, such as BestN"
        )
        raise ConfigError([problem], target="CheckpointConfig")
    return checkpoints.num_to_keep


def storage_of(storage_path: str) -> tuple[FileSystem, str]:
    """Return the storage that Ray is to use, and the path in it."""
    storage, path = FileSystem.from_uri(storage_path)
    return PyFileSystem(StepsStay(ArrowFSWrapper(storage))), path


def trainer(
    config: dict[str, Any], workers: int, storage_path: str, checkpoints: CheckpointConfig
) -> JaxTrainer:
    """Return a trainer with one worker for each of ``workers`` nodes.

    Args:
      storage_path: an absolute path that all nodes see, or a URL such as gs://bucket/ray-results.

    Raises:
      ConfigError: ``checkpoints`` asks for what cannot be kept.
    """
    config = {
        **config,
        "dir": f"{storage_path}/{config['run_id']}/{STEPS}",
        "keep_last_n": kept_steps(checkpoints),
    }
    storage, path = storage_of(storage_path)
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
            storage_path=path,
            storage_filesystem=storage,
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=checkpoints,
        ),
    )


def forget_slices() -> None:
    """Drop the variables of an earlier job on a host that came back, in a worker that starts.

    JAX's start would wait for the slices of then. Ray sets them anew for a job of several slices.
    """
    for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID"):
        os.environ.pop(f"MEGASCALE_{name}", None)


def connect(address: str = "auto", **settings: Any) -> None:
    """Connect to the cluster, as ``ray.init`` does; all workers of the program start afresh."""
    hook = {"worker_process_setup_hook": forget_slices}
    ray.init(address=address, runtime_env=hook, **settings)


@ray.remote(num_cpus=0)
def free_node(run_id: str) -> None:
    """Remove the run from this node's RAM; prints what it did."""
    words = ["doctor", "--clean", "--local-dir", local_dir(), "--run-id", run_id]
    program = [sys.executable, "-m", "emergency_ckpt.tools.cli.main", *words]
    if Path(local_dir()).is_dir():
        subprocess.run([*program, "--older-than", "0", "--yes"], check=False)


def run(
    config: dict[str, Any], workers: int, storage_path: str, checkpoints: CheckpointConfig
) -> Result:
    """Train to the end, then free the RAM of all nodes. Raises what ``trainer`` and ``fit`` do."""
    result = trainer(config, workers, storage_path, checkpoints).fit()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    ray.get([free_node.options(scheduling_strategy=p).remote(config["run_id"]) for p in places])
    return result


def main() -> None:
    """``train.py WORKERS STORAGE_PATH``, on the head node."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    connect()
    config = {
        "run_id": "run7",
        "secret_file": "/etc/eckpt/secret",  # on every node
        "save_every": 10,
        "store_every": 100,
        "last_step": 1000,
    }
    result = run(config, int(sys.argv[1]), sys.argv[2], CheckpointConfig(num_to_keep=3))
    print(result.checkpoint, result.metrics)


if __name__ == "__main__":
    main()
