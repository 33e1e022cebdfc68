"""A loop over a Grain DataLoader, whose iterator is saved with each step in both tiers."""

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer

# In a job of several processes call jax.distributed.initialize() first. Each host is a slice of its
# own here, so that another host has a copy of its state.
mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("slice", "fsdp"))
shardings = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
state = jax.jit(lambda: {"w": jnp.zeros(1024)}, out_shardings=shardings)()
loader = grain.DataLoader(
    data_source=grain.RangeDataSource(0, 1000, 1),
    sampler=grain.IndexSampler(1000, shard_options=grain.NoSharding(), shuffle=True, seed=0),
    operations=[grain.Batch(8)],
    worker_count=0,
)
data = iter(loader)


@jax.jit(donate_argnums=0)
def train_step(state, batch):
    return {"w": 0.9 * state["w"] + jnp.sin(batch).sum()}


last_step = 100
config = EmergencyCheckpointer.default_config().set(
    dir="/mnt/checkpoints/grain",
    local_dir="/dev/shm/eckpt",
    mesh=mesh,
    replica_axis="slice",
    local_save_every=10,
    save_every=1000,
)
with config.instantiate() as ckpt:
    step, state = ckpt.restore(state=state, host_state=data)  # and data is where it was
    print(f"start after step {step}", flush=True)
    for step in range((step or 0) + 1, last_step + 1):
        state = train_step(state, next(data))
        ckpt.save(step=step, state=state, host_state=data)
    ckpt.save(step=last_step, state=state, host_state=data, force=True)  # last step, both tiers
print(f"done: {float(state['w'].sum()).hex()}")
