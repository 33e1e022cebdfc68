"""A loop with Flax NNX and Optax: parameters, optimizer state and random keys are all saved."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer

# In a job of several processes call jax.distributed.initialize() first. Each host is a slice of its
# own here, so that another host has a copy of its state.
mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("slice", "fsdp"))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, batch):
        return self.dropout(self.layer(batch))


def first():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


graph = nnx.graphdef(nnx.eval_shape(first))
# Compiled for the whole mesh: every process makes its own part of the state, a tree of arrays.
sharding = NamedSharding(mesh, PartitionSpec())
state = jax.jit(lambda: nnx.state(first()), out_shardings=sharding)()


@jax.jit
def train_step(state, batch):
    model, optimizer = nnx.merge(graph, state)
    grads = nnx.grad(lambda model: (model(batch) ** 2).mean())(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))


last_step = 100
config = EmergencyCheckpointer.default_config().set(
    dir="/mnt/checkpoints/nnx", local_dir="/dev/shm/eckpt", replica_axis="slice"
)
with config.instantiate() as ckpt:
    step, state = ckpt.restore(state=state)
    print(f"start after step {step}", flush=True)
    for step in range((step or 0) + 1, last_step + 1):
        state = train_step(state, jax.random.normal(jax.random.key(step), (4, 16)))
        ckpt.save(step=step, state=state)
    ckpt.save(step=last_step, state=state, force=True)  # last step, both tiers
model, _ = nnx.merge(graph, state)
print(f"done: {float(model.layer.kernel.sum()).hex()}")
