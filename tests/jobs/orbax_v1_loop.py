"""A training loop as users of Orbax v1 have it, with our import, on slices over real processes."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import emergency_ckpt.orbax.v1 as ocp
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

LAST_STEP = 24


def main(root: Path, slices: int) -> None:
    """Train to the last step, and write what the restored state was."""
    env = JobEnvironment.from_environ()
    initialize_job(env)
    mesh = Mesh(np.array(jax.devices()).reshape(slices, -1), ("data", "fsdp"))
    abstract = {
        "w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))),
        "bias": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P())),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
    }
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    @jax.jit
    def initial():
        return {"w": jnp.zeros((8, 3)), "bias": jnp.zeros(3), "step": jnp.int32(0)}

    @jax.jit
    def train_step(state):
        step = state["step"] + 1
        return {"w": state["w"] + step, "bias": state["bias"] - step, "step": step}

    initial = jax.jit(initial, out_shardings=shardings)
    train_step = jax.jit(train_step, out_shardings=shardings, donate_argnums=0)
    policies = ocp.training.save_decision_policies
    with ocp.training.Checkpointer(
        root / "checkpoints",
        save_decision_policy=policies.FixedIntervalPolicy(20),
        settings={"local_save_every": 10},
    ) as checkpointer:
        first, found = checkpointer.latest, None
        if first is None:
            state = initial()
        else:
            state = checkpointer.load(first, abstract)
            found = int(state["step"])
            assert np.all(np.asarray(state["bias"]) == -sum(range(found + 1)))
        for step in range((found or 0) + 1, LAST_STEP + 1):
            state = train_step(state)
            checkpointer.save_async(step, state)
            report_step(step)
        checkpointer.wait()
        total = sum(range(LAST_STEP + 1))
        whole = all(np.all(np.asarray(s.data) == total) for s in state["w"].addressable_shards)
        steps = [each.step for each in checkpointer.checkpoints]
    value = {"first": first and first.step, "found": found, "whole": bool(whole), "steps": steps}
    out = root / f"results_{env.restart_count}_{env.process_index}.json"
    out.write_text(json.dumps({"loop": {"value": value}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
