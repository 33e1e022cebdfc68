"""A loop with Flax's TrainState and Optax: all of the state is saved, the optimizer's too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer

# In a job of several processes call jax.distributed.initialize() first. Each host is a slice of its
# own here, so that another host has a copy of its state.
mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("slice", "fsdp"))
model = nn.Dense(8)


def first_state():
    params = model.init(jax.random.key(0), jnp.ones((1, 16)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


# Compiled for the whole mesh: every process makes its own part of the state.
state = jax.jit(first_state, out_shardings=NamedSharding(mesh, PartitionSpec()))()


@jax.jit
def train_step(state, batch):
    grads = jax.grad(lambda params: (state.apply_fn(params, batch) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads)


last_step = 100
config = EmergencyCheckpointer.default_config().set(
    dir="/mnt/checkpoints/flax",
    local_dir="/dev/shm/eckpt",
    mesh=mesh,
    replica_axis="slice",
    local_save_every=10,
    save_every=1000,
)
with config.instantiate() as ckpt:
    step, state = ckpt.restore(state=state)
    print(f"start after step {step}", flush=True)
    for step in range((step or 0) + 1, last_step + 1):
        state = train_step(state, jax.random.normal(jax.random.key(step), (4, 16)))
        ckpt.save(step=step, state=state)
    ckpt.save(step=last_step, state=state, force=True)  # last step, both tiers
print(f"done: {float(sum(leaf.sum() for leaf in jax.tree.leaves(state.params))).hex()}")
