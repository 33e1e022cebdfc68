"""The wait for a silent process, of JAX and of a simulated job."""

from __future__ import annotations

import inspect

import jax

from emergency_ckpt.config import Config
from emergency_ckpt.tools.simulated_job import HEARTBEAT_TIMEOUT_S


def test_jax_waits_longer_for_a_silent_process_than_a_transfer() -> None:
    """Else a process that is stopped for some seconds in a restore ends the job."""
    defaults = inspect.signature(jax.distributed.initialize).parameters
    jax_default_s = defaults["heartbeat_timeout_seconds"].default
    longest_silence_s = Config(stall_timeout_s=1000.0).transfer_timeout_s
    assert HEARTBEAT_TIMEOUT_S >= jax_default_s > 2 * longest_silence_s
