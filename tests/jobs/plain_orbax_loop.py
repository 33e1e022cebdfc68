"""A training loop as users of plain Orbax have it. The test changes its first import of Orbax."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

LAST_STEP = 24


def main(root: Path, slices: int) -> None:
    """Train to the last step, and write what the restored state was."""
    env = JobEnvironment.from_environ()
    initialize_job(env)
    mesh = Mesh(np.array(jax.devices()).reshape(slices, -1), ("data", "fsdp"))
    shardings = {
        "w": NamedSharding(mesh, P("fsdp")),
        "bias": NamedSharding(mesh, P()),
        "step": NamedSharding(mesh, P()),
    }

    @jax.jit
    def initial():
        return {"w": jnp.zeros((8, 3)), "bias": jnp.zeros(3), "step": jnp.int32(0)}

    @jax.jit
    def train_step(state):
        step = state["step"] + 1
        return {"w": state["w"] + step, "bias": state["bias"] - step, "step": step}

    initial = jax.jit(initial, out_shardings=shardings)
    train_step = jax.jit(train_step, out_shardings=shardings, donate_argnums=0)
    state = initial()
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)
    manager = ocp.CheckpointManager(root / "checkpoints", options=options)
    first, found = manager.latest_step(), None
    if first is not None:
        state = manager.restore(first, args=ocp.args.StandardRestore(state))
        found = int(state["step"])
        assert np.all(np.asarray(state["bias"]) == -sum(range(found + 1)))
    for step in range((first or 0) + 1, LAST_STEP + 1):
        state = train_step(state)
        manager.save(step, args=ocp.args.StandardSave(state))
        if manager.reached_preemption(step):
            break
        report_step(step)
    manager.wait_until_finished()
    total = sum(range(LAST_STEP + 1))
    whole = all(np.all(np.asarray(s.data) == total) for s in state["w"].addressable_shards)
    value = {"first": first, "found": found, "whole": bool(whole), "steps": manager.all_steps()}
    out = root / f"results_{env.restart_count}_{env.process_index}.json"
    out.write_text(json.dumps({"loop": {"value": value}}))
    manager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
