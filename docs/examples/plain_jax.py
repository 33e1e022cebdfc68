"""A training loop in plain JAX: one process, or ``eckpt launch`` (clusters: cluster_jax.py).

Its one argument is the directory of the persistent tier.
"""

import os
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

job = JobEnvironment.from_environ() if JobEnvironment.present() else None
if job is not None:
    initialize_job(job)  # of `eckpt launch`: several hosts on this machine
elif "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize()  # your cluster; one process needs none of this

slices = job.slice_count if job else 1  # on a cluster: as many as the job has
mesh = Mesh(np.array(jax.devices()).reshape(slices, -1), ("slice", "fsdp"))
shardings = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
state = jax.jit(lambda: {"w": jnp.zeros(1024)}, out_shardings=shardings)()
data = iter(grain.MapDataset.range(1000).seed(0).shuffle().repeat().batch(8).to_iter_dataset())


@jax.jit(donate_argnums=0)
def train_step(state, batch):
    return {"w": 0.9 * state["w"] + jnp.sin(batch).sum()}


last_step = 100
directory = sys.argv[1] if sys.argv[1:] else "/mnt/checkpoints/run7"
local_dir = job.local_dir if job else "/dev/shm/eckpt"
config = EmergencyCheckpointer.default_config().set(
    dir=directory,  # persistent tier: an absolute path, or a URL such as gs://bucket/run7
    local_dir=local_dir,  # local tier: a directory on this host's tmpfs, as /dev/shm/eckpt
    replica_axis="slice",  # slices are replicas along this axis of the state's mesh
    local_save_every=10,
    save_every=1000,
)
with config.instantiate() as ckpt:  # on every process
    step, state = ckpt.restore(state=state, host_state=data)  # (None, state) on a fresh start
    print(f"start after step {step}", flush=True)
    for step in range((step or 0) + 1, last_step + 1):
        state = train_step(state, next(data))  # may donate the state
        ckpt.save(step=step, state=state, host_state=data)  # after every step
        if ckpt.reached_preemption(step):  # SIGTERM: both tiers save this step
            ckpt.wait_until_finished()
            raise SystemExit(143)
    ckpt.save(step=last_step, state=state, host_state=data, force=True)  # last step, both tiers
print(f"done: {state['w'].addressable_shards[0].data[0]!r}")
