"""Start JAX as one process of a job of simulated slices on this machine's CPU."""

from __future__ import annotations

import os
from typing import Protocol

import jax

HEARTBEAT_TIMEOUT_S = 100
"""JAX's own default. After so long a silence of one process JAX aborts all of them; a process that
is only stopped for a while must cost no more than ``transfer_timeout_s`` and another attempt. A
supervisor ends the survivors of a dead process at once; this bounds the wait where there is none.
"""


class SimulatedProcess(Protocol):
    """What a launcher knows of this process; ``launch.environment.JobEnvironment`` is one."""

    @property
    def coordinator_address(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    @property
    def process_count(self) -> int: ...
    @property
    def devices_per_host(self) -> int: ...


def initialize_job(job: SimulatedProcess) -> None:
    """Make this process part of ``job``. Collective; must come before any other use of JAX.

    The coordination service listens on the given address only: JAX's default is all interfaces.
    """
    os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = job.coordinator_address
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices_per_host)
    jax.distributed.initialize(
        job.coordinator_address,
        job.process_count,
        job.process_index,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )
