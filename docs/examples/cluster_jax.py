"""A training loop on a cluster whose manifests name each process's place: see deploy/gke."""

import os
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.job_environment import JobEnvironment

env, last_step = os.environ, 100
job = JobEnvironment.from_environ()
# All three arguments: on Kubernetes JAX itself detects the processes of one slice only.
jax.distributed.initialize(job.coordinator_address, job.process_count, job.process_index)

devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
mesh = Mesh(np.array(devices).reshape(job.slice_count, -1), ("slice", "fsdp"))
shardings = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
state = jax.jit(lambda: {"w": jnp.zeros(1024)}, out_shardings=shardings)()
data = iter(grain.MapDataset.range(1000).seed(0).shuffle().repeat().batch(8).to_iter_dataset())


@jax.jit(donate_argnums=0)
def train_step(state, batch):
    return {"w": 0.9 * state["w"] + jnp.sin(batch).sum()}


config = EmergencyCheckpointer.default_config().set(
    dir=env["ECKPT_DIR"],
    local_dir=str(job.local_dir),
    run_id=env["ECKPT_RUN_ID"],
    secret_file=env["ECKPT_SECRET_FILE"],
    bind_host=env["ECKPT_BIND_HOST"],
    bind_port=int(env["ECKPT_PEER_PORT"]),
    preemption_grace_s=float(env["ECKPT_PREEMPTION_GRACE_S"]),
    require={"secret", "peers"},
    local_keep_last_n=int(env["ECKPT_LOCAL_KEEP_LAST_N"]),
    placement=env["ECKPT_PLACEMENT"],
    mesh=mesh,
    replica_axis="slice",
    local_save_every=10,
)
try:
    ckpt = config.instantiate()
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(os.EX_CONFIG)  # the manifests start no such job again
with ckpt:
    step, state = ckpt.restore(state=state, host_state=data)
    print(f"start after step {step}", flush=True)
    for step in range((step or 0) + 1, last_step + 1):
        state = train_step(state, next(data))
        ckpt.save(step=step, state=state, host_state=data)
        if ckpt.reached_preemption(step):
            ckpt.wait_until_finished()
            sys.exit(143)
    ckpt.save(step=last_step, state=state, host_state=data, force=True)
print(f"done: {state['w'].addressable_shards[0].data[0]!r}")
