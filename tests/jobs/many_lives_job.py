"""A job that trains until it is killed, and one that ends well; both tiers and the event log.

    many_lives_job.py ROOT SLICES RUN_ID STEPS

It saves every step to RAM and every second to storage, below ROOT, and ends after STEPS more steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import Iterator, mesh_of

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.extras.event_log import EventLogObserver
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

STORED_EVERY, KEPT = 2, 2


def main(root: Path, slices: int, run_id: str, steps: int) -> None:
    env = JobEnvironment.from_environ()
    initialize_job(env)
    sharding = NamedSharding(mesh_of(slices), P("fsdp"))
    iterator, ones = Iterator(env.process_index), np.ones(1024, np.float32)

    def state_at(step: int) -> dict[str, jax.Array]:
        return {"w": jax.make_array_from_callback((1024,), sharding, lambda i: (ones * step)[i])}

    ckpt = EmergencyCheckpointer(
        run_id=run_id,
        dir=str(root / "storage" / run_id),
        local_dir=str(env.local_dir),
        mesh=sharding.mesh,
        replica_axis="slice",
        local_save_every=1,
        save_every=STORED_EVERY,
        keep_last_n=KEPT,
        on_event=EventLogObserver(root / "events" / run_id),
        host_state_remap=lambda payloads, process, count: payloads[0],
        stall_timeout_s=30,
    )
    with ckpt:
        found, state = ckpt.restore(state=state_at(0), host_state=iterator)
        first = found or 0
        assert np.all(state["w"].addressable_shards[0].data == first), "another step's bytes"
        for step in range(1, steps + 1):
            ckpt.save(step=first + step, state=state_at(first + step), host_state=iterator)
            ckpt.wait_until_finished()
            ckpt.check_for_errors()
            report_step(first + step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
