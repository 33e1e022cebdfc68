"""The place of a worker in its job, as the engine tells it."""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job, share_compiled_programs


@dataclass(frozen=True)
class Place:
    """This process.

    Attributes:
      life: number of starts of this process before.
      local_dir: the ramdisk of its host.
      join: joins ``jax.distributed``; collective.
    """

    process: int
    life: int
    slices: int
    devices_per_host: int
    local_dir: Path
    join: Callable[[], None]


def find(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place that `eckpt launch` or Slurm gave to this process."""
    if JobEnvironment.present(environ):
        env = JobEnvironment.from_environ(environ)
        return Place(
            process=env.process_index,
            life=env.restart_count,
            slices=env.slice_count,
            devices_per_host=env.devices_per_host,
            local_dir=env.local_dir,
            join=lambda: initialize_job(env),
        )
    process = int(environ["SLURM_PROCID"])
    with (options.marks_dir.parent / f"starts-{process}").open("a+") as starts:
        life = starts.tell()
        starts.write("*")
    options.local_dir.mkdir(mode=0o700, exist_ok=True)
    return Place(process, life, options.slices, 1, options.local_dir, _join_by_slurm)


def _join_by_slurm() -> None:
    share_compiled_programs()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()
