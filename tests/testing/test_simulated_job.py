"""Jobs on CPU devices compile a program once, not once in each life."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import JobSpec, checked, job_of, run_job

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

env = JobEnvironment.from_environ()
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
initialize_job(env)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
over_all = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=over_all)
jax.jit(lambda x: jnp.sin(x @ x.T).sum()).lower(x).compile()
hits = "/jax/compilation_cache/cache_hits" in events
(env.local_dir / f"life_{env.restart_count}.json").write_text(json.dumps(hits))
sys.exit(env.restart_count == 0)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[JobSpec]:
    with job_of(PROGRAM, tmp_path, hosts_per_slice=1) as job:
        yield job


@pytest.mark.timeout(120)
def test_second_life_finds_the_programs_of_the_first(spec: JobSpec) -> None:
    checked(run_job(spec))
    hits = {
        life: [
            json.loads(path.read_text())
            for path in sorted(spec.local_root.rglob(f"life_{life}.json"))
        ]
        for life in (0, 1)
    }
    # In the first life one may find what the other has just put there.
    assert not all(hits[0])
    assert hits[1] == [True, True]
