"""Saves to a bucket, with a count of all bytes on the sockets; ``test_traffic.py`` judges.

Each process reaches storage by an address of its own.
"""

from __future__ import annotations

import os

from counting_proxy import URLS_VARIABLE

from emergency_ckpt.tools.job_environment import JobEnvironment

if URLS_VARIABLE in os.environ:  # before the clients are imported
    _URL = os.environ[URLS_VARIABLE].split()[JobEnvironment.from_environ().process_index]
    os.environ["STORAGE_EMULATOR_HOST"] = os.environ["TENSORSTORE_GCS_HTTP_URL"] = _URL

from typing import Any

import gcs_job
from jax.experimental import multihost_utils
from job_process import Iterator, JobProcess, run_program
from socket_bytes import SocketBytes


def save(world: JobProcess) -> dict[str, Any]:
    """Two saves; the second is counted: the ways between the processes are open by then."""
    chosen = gcs_job.settings(world)
    mesh = chosen["mesh"]
    iterator = Iterator(world.process)
    with world.config("run", **chosen).instantiate() as ckpt:
        ckpt.restore(state=gcs_job.specs(mesh), host_state=iterator)
        ckpt.save(step=5, state=gcs_job.state(5, mesh), host_state=iterator.at(5))
        ckpt.wait_until_finished()
        state = gcs_job.state(10, mesh)
        world.meet()
        with SocketBytes() as saving:
            ckpt.save(step=10, state=state, host_state=iterator.at(10))
            ckpt.wait_until_finished()
            world.meet()
        ckpt.check_for_errors()
        # What does cross, for comparison: every process gets a leaf from every other.
        part = state["big1"].addressable_shards[0].data
        with SocketBytes() as crossing:
            multihost_utils.process_allgather(part)
            world.meet()
        world.meet()
    return {"saving": saving.sums(), "crossing": crossing.sums(), "part_bytes": part.nbytes}


if __name__ == "__main__":
    run_program({"save": save})
