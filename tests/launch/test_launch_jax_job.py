"""A real job of four JAX processes: the environment is what jax.distributed needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import JobSpec, job_of, run_job

PROGRAM = """
import json
import time
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from emergency_ckpt.tools.launch.progress_file import report_step
from launch_support import JobEnvironment

env = JobEnvironment.from_environ()
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
jax.distributed.initialize(env.coordinator_address, env.process_count, env.process_index)
mesh = Mesh(np.array(jax.devices()).reshape(env.slice_count, -1), ("replica", "shard"))
slices = {int(row) for row, _ in np.argwhere(mesh.devices == jax.local_devices()[0])}
rows = NamedSharding(mesh, P(("replica", "shard")))
index = jax.make_array_from_callback(
    (env.process_count,), rows, lambda _: np.array([env.process_index], np.int32)
)
psum = jax.shard_map(
    lambda x: jax.lax.psum(x, ("replica", "shard")), mesh=mesh, in_specs=rows.spec, out_specs=P()
)
total = int(np.asarray(jax.jit(psum)(index).addressable_data(0))[0])
(env.local_dir / f"life_{env.restart_count}.json").write_text(json.dumps({
    "process": jax.process_index(), "count": jax.process_count(), "devices": jax.device_count(),
    "slices": sorted(slices), "slice_index": env.slice_index, "total": total,
    "compiled_before": "/jax/compilation_cache/cache_hits" in events,
}))
report_step(1)
while env.restart_count == 0:
    time.sleep(1)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[JobSpec]:
    env = {
        "PYTHONPATH": ":".join(sys.path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # this program compiles little
    }
    with job_of(PROGRAM, tmp_path, hosts_per_slice=2, env=env, grace_s=0.5) as job:
        yield job


def test_four_processes_add_up_before_and_after_a_slice_is_lost(spec: JobSpec) -> None:
    fault = "step=1 kill=slice:1 permute=reverse exact"
    result = run_job(spec, fault, timeout_s=240).check()
    assert len(result.lives) == 2
    for host in range(4):
        for life, process in ((0, host), (1, 3 - host)):
            if life == 0 and host < 2:
                continue  # may have been ended before it wrote
            said = json.loads((spec.ramdisk(host) / f"life_{life}.json").read_text())
            compiled_before = said.pop("compiled_before")
            # JAX keeps what process 0 compiled; on CPU each process has another key.
            assert compiled_before == (life == 1 and process == 0)
            assert said == {
                "process": process,
                "count": 4,
                "devices": 4,
                "slices": [process // 2],
                "slice_index": process // 2,
                "total": 0 + 1 + 2 + 3,
            }
