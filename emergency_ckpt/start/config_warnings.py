"""Warnings about settings that are valid but probably mistakes, logged once at the start."""

from __future__ import annotations

import os

from emergency_ckpt.config import Config
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.ram.mounts import RAM_FILE_SYSTEMS, file_system_of
from emergency_ckpt.types import LOCAL

LAUNCHED_COUNT = "ECKPT_PROCESS_COUNT"
"""Number of processes that ``eckpt launch`` has started; set for each of them."""


def check_joined(process_count: int) -> None:
    """Raise ConfigError when a launcher has started more processes than JAX knows of, or fewer.

    Each would otherwise be a job of its own, all in one directory.
    """
    text = os.environ.get(LAUNCHED_COUNT, "")
    if not (text.isascii() and text.isdigit()) or int(text[:9]) == process_count:
        return
    raise ConfigError(
        [
            f"the launcher has started {int(text[:9])} processes ({LAUNCHED_COUNT}), but"
            f" jax.process_count() is {process_count}: call jax.distributed.initialize, or"
            " initialize_job of emergency_ckpt.tools.simulated_job, before anything else; a"
            f" program that is no part of the job must not have {LAUNCHED_COUNT} in its environment"
        ]
    )


def config_warnings(config: Config, process_index: int) -> list[str]:
    """Return a line for each setting that is probably a mistake. Not collective.

    Lines about the whole job are returned on process 0 only.
    """
    warnings = [] if process_index else _job_warnings(config)
    if LOCAL in config.save_plans():
        kind = file_system_of(config.local_dir)
        if kind is not None and kind not in RAM_FILE_SYSTEMS:
            warnings.append(
                f"local_dir {config.local_dir!r} lies on {kind}, not on tmpfs: saves to RAM wait"
                " for a disk; use a directory on a tmpfs such as /dev/shm"
            )
    return warnings


def _job_warnings(config: Config) -> list[str]:
    warnings: list[str] = []
    if not config.save_plans():
        warnings.append(
            "neither tier saves: no interval and no policy is set; this job can only restore"
        )
    if config.mesh is None and isinstance(config.replica_axis, str):
        warnings.append(
            f"replica_axis {config.replica_axis!r} is set, but mesh is not: slices are taken"
            " from the devices' slice_index, else from the mesh of the state's shardings"
        )
    return warnings
