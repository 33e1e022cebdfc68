"""axlearn's own trainer on two processes: killed, one host's RAM removed, resumed, losses compared.

    PYTHONPATH=AXLEARN python tests/axlearn/real_trainer.py

AXLEARN is a checkout of axlearn's sources (34aed43c). No test runs this program, because axlearn
pins other versions of JAX; docs/migrating_axlearn.md names the packages. The program ends with 77
where axlearn cannot be imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import numpy as np

try:
    from axlearn.common import layers, learner, optimizers
    from axlearn.common.base_model import BaseModel
    from axlearn.common.checkpointer import every_n_steps_policy
    from axlearn.common.config import config_for_function
    from axlearn.common.input_dispatch import SpmdInputDispatcher
    from axlearn.common.input_grain import Input
    from axlearn.common.trainer import SpmdTrainer

    from emergency_ckpt.axlearn import EmergencyCheckpointer
except ImportError as missing:
    print(f"axlearn cannot be imported: {missing}")
    sys.exit(77)

COUNT, LAST_STEP, KILLED_AT, RESTORED = 2, 25, 17, 10
LOSS = "LOSS"


class Model(BaseModel):
    """A linear layer, and the mean of its squared errors."""

    def __init__(self, cfg: Any, *, parent: Any) -> None:
        super().__init__(cfg, parent=parent)
        linear = layers.Linear.default_config()
        spec = (None, "fsdp")
        self._add_child(
            "fc", linear.set(input_dim=8, output_dim=8, bias=True, param_partition_spec=spec)
        )

    def forward(self, input_batch: Any) -> Any:
        return ((self.fc(input_batch["x"]) - input_batch["y"]) ** 2).mean(), {}


def source(batch: int) -> Any:
    """Return a builder of Grain data with examples that their index decides."""

    def example(index: int) -> dict[str, Any]:
        values = np.random.default_rng(int(index)).normal(size=(2, 8)).astype(np.float32)
        return {"x": values[0], "y": values[1]}

    def build(dispatch: Any) -> Any:
        data = grain.MapDataset.range(100_000).shuffle(seed=1)
        data = data[dispatch.shard_index[0] :: dispatch.num_shards[0]]
        return data.map(example).to_iter_dataset().batch(batch)

    return build


def trainer_config(root: str, ram: str) -> Any:
    """Return the config of a linear model on ``COUNT`` slices of one process each."""
    dispatcher = SpmdInputDispatcher.default_config()
    optimizer = config_for_function(optimizers.sgd_optimizer)
    return SpmdTrainer.default_config().set(
        name="trial",
        dir=root,
        mesh_axis_names=("data", "fsdp"),
        mesh_shape=(jax.process_count(), jax.local_device_count()),
        batch_axis_names=("data",),
        model=Model.default_config().set(dtype=jax.numpy.float32, name="model"),
        input=Input.default_config().set(
            source=config_for_function(source).set(batch=4),
            input_dispatcher=dispatcher.set(global_logical_batch_size=4 * COUNT),
        ),
        learner=learner.Learner.default_config().set(
            optimizer=optimizer.set(learning_rate=0.1, decouple_weight_decay=True)
        ),
        max_step=LAST_STEP,
        save_input_iterator=True,
        checkpointer=EmergencyCheckpointer.default_config().set(
            save_policy=config_for_function(every_n_steps_policy).set(n=1000),
            local_save_policy=config_for_function(every_n_steps_policy).set(n=10),
            local_dir=ram,
            trainer_dir=root,
            replica_axis_index=0,
        ),
    )


def train(coordinator: str, index: int, root: str, ram: str, kill_at: int) -> None:
    """Train as one process of the job, and print each loss exactly."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_prng_impl", "rbg")  # as axlearn.common.launch does
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, COUNT, index)
    trainer = trainer_config(root, ram).instantiate(parent=None)
    run_step = trainer._run_step

    def printed(*args: Any, **keywords: Any) -> Any:
        if trainer.step == kill_at:
            trainer.checkpointer.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
        output = run_step(*args, **keywords)
        print(LOSS, trainer.step, float(output["loss"]).hex(), flush=True)
        return output

    trainer._run_step = printed
    trainer.run(jax.random.PRNGKey(1))


def life(root: Path, rams: list[Path], kill_at: int = 0) -> dict[int, str]:
    """Run one life of the job; return the losses of process 0 by step."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        coordinator = f"localhost:{listener.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, coordinator, str(index), str(root), str(ram), str(kill_at)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, ram in enumerate(rams)
    ]
    outputs = [process.communicate()[0] for process in processes]
    lines = [line.split() for line in outputs[0].splitlines() if line.startswith(LOSS)]
    return {int(step): loss for _, step, loss in lines}


def main() -> int:
    """Compare an undisturbed run with a run that is killed; return the exit status."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        top = Path(folder)
        undisturbed = life(top / "undisturbed", [top / f"first{i}" for i in range(COUNT)])
        rams = [top / f"host{i}" for i in range(COUNT)]
        before = life(top / "killed", rams, KILLED_AT)
        shutil.rmtree(rams[1])
        after = life(top / "killed", rams)
    wanted = {step: loss for step, loss in undisturbed.items() if step > RESTORED}
    is_same = after == wanted and before.items() <= undisturbed.items()
    print(f"killed after step {max(before, default=0)}; steps of the next life: {sorted(after)}")
    print("the losses are the same" if is_same else f"{after}\n{wanted}")
    return 0 if is_same else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
