"""A loop of plain Orbax, which gets a RAM tier by its import."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import emergency_ckpt.orbax.checkpoint as ocp  # was: import orbax.checkpoint as ocp

# In a job of several processes call jax.distributed.initialize() first. Each host is a slice of its
# own here, so that another host has a copy of its state.
mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("slice", "fsdp"))
shardings = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
state = jax.jit(lambda: {"w": jnp.zeros(1024)}, out_shardings=shardings)()


@jax.jit
def train_step(state, step):
    return {"w": 0.9 * state["w"] + jnp.sin(step)}


last_step = 100
options = ocp.CheckpointManagerOptions(
    save_interval_steps=1000,
    max_to_keep=3,
    local_directory="/dev/shm/eckpt",  # RAM: every 10 steps, unless told otherwise
)
with ocp.CheckpointManager("/mnt/checkpoints/orbax", options=options) as manager:
    latest = manager.latest_step()
    print(f"start after step {latest}", flush=True)
    if latest is not None:
        state = manager.restore(latest, args=ocp.args.StandardRestore(state))
    for step in range((latest or 0) + 1, last_step + 1):
        state = train_step(state, step)
        manager.save(step, args=ocp.args.StandardSave(state), force=step == last_step)
print(f"done: {float(state['w'].sum()).hex()}")
