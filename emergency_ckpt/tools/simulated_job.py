"""The start of JAX as one process of a job of simulated slices on this machine's CPU."""

from __future__ import annotations

import os

import jax

from emergency_ckpt.private_names import private_module
from emergency_ckpt.tools.job_environment import JobEnvironment

HEARTBEAT_TIMEOUT_S = 100
"""JAX's default. After this silence of one process, in seconds, JAX aborts all processes. A process
that is only stopped for a while must cost at most ``transfer_timeout_s`` and another attempt. A
supervisor ends the survivors of a dead process at once; without one this bounds their wait.
"""

_cache_key = private_module(
    "jax._src.cache_key", "_hash_devices", "_hash_accelerator_config", project="jax"
)


def initialize_job(job: JobEnvironment) -> None:
    """Make this process part of ``job``. Collective; call it before any other use of JAX.

    The coordination service listens on the given address only; JAX's default is all interfaces.
    """
    share_compiled_programs()
    os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = job.coordinator_address
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices_per_host)
    jax.distributed.initialize(
        job.coordinator_address,
        job.process_count,
        job.process_index,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )


def share_compiled_programs() -> None:
    """Let all processes find the programs in JAX's compilation cache, not process 0 alone.

    Process 0 alone writes that cache. Its key has a fingerprint of all devices, which on CPU
    differs between the processes of one job (JAX 0.10), so the others would compile in each life.
    On accelerators it does not differ. Here the kinds of the devices take its place, which JAX
    itself takes where a backend has no fingerprint.
    """
    _cache_key._hash_accelerator_config = _cache_key._hash_devices
