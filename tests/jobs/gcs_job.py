"""Programs of a job whose persistent tier is a bucket; ``test_gcs_job.py`` judges.

With ``only_primary`` the processes outside of slice 0 get an address where nobody listens as their
storage: what they would send or ask for would fail.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from emergency_ckpt.tools.job_environment import JobEnvironment

_ENV = JobEnvironment.from_environ()
_PER_SLICE = _ENV.process_count // int(sys.argv[2])
if "only_primary" in sys.argv[3] and _ENV.process_index >= _PER_SLICE:
    os.environ["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:9"
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = "http://127.0.0.1:9"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from fake_gcs import GcsControl, bytes_served  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from job_process import (  # noqa: E402
    Iterator,
    JobProcess,
    differences,
    finish,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)

DIRECTORY = "gs://bucket/run"
BIG_LEAVES = 6
BIG_SHAPE = (128, 1024)
"""Chunks of 128 KiB: one of 64 KiB may be read twice, as a gap between two others."""


def big(step: int, mesh: Mesh) -> dict[str, Any]:
    """Leaves of random bits, which do not compress: 256 KiB each, and one that is replicated."""
    leaves: dict[str, Any] = {}
    for number in range(BIG_LEAVES):
        bits = np.random.default_rng([step, number]).integers(0, 2**32, BIG_SHAPE, np.uint32)
        spec = P() if number == 0 else P("fsdp")
        leaves[f"big{number}"] = jax.make_array_from_callback(
            BIG_SHAPE, NamedSharding(mesh, spec), lambda index, bits=bits: bits[index]
        )
    return leaves


def state(step: int, mesh: Mesh) -> dict[str, Any]:
    return {**state_at(step, mesh), **big(step, mesh)}


def specs(mesh: Mesh) -> dict[str, Any]:
    shapes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in big(0, mesh).items()
    }
    return {**specs_on(mesh), **shapes}


def wrong_in(found: dict[str, Any], step: int, mesh: Mesh) -> list[str]:
    small = {name: value for name, value in found.items() if not name.startswith("big")}
    wrong = differences(small, step, mesh)
    for name, right in big(step, mesh).items():
        shards = zip(found[name].addressable_shards, right.addressable_shards, strict=True)
        wrong += [name for a, b in shards if not np.array_equal(a.data, b.data)]
    return wrong


def settings(world: JobProcess, **more: Any) -> dict[str, Any]:
    return {
        "dir": DIRECTORY,
        "mesh": mesh_of(world.slices),
        "save_every": 5,
        "local_save_every": 0,
        **more,
    }


def save_only_primary(world: JobProcess) -> Any:
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    with world.config("run", **settings(world)).instantiate() as ckpt:
        ckpt.restore(state=specs(mesh), host_state=iterator)
        for step in range(1, 6):
            ckpt.save(step=step, state=state(step, mesh), host_state=iterator.at(step))
        finish(ckpt)
        world.meet()
    return [e["step"] for e in world.named("persistent.complete")]


def restore(world: JobProcess, **more: Any) -> dict[str, Any]:
    chosen = settings(world, **more)
    mesh = chosen["mesh"]
    iterator = Iterator(-1)
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    with world.config("run", **chosen).instantiate() as ckpt:
        world.meet()
        if world.process == 0:
            control.clear_requests()
        world.meet()
        step, found = ckpt.restore(state=specs(mesh), host_state=iterator)
        report = ckpt.last_restore
        world.meet()
        records = control.requests() if world.process == 0 else []
        world.meet()
    assert step is not None
    assert report is not None
    big_ranges = [
        [record.target, record.range_header]
        for record in records
        if record.operation == "objects.media"
        and "/d/" in record.target
        and record.bytes_out > 4096
    ]
    return {
        "step": step,
        "tier": report.tier,
        "wrong": wrong_in(found, step, mesh),
        "iterator_right": iterator.is_at(step, world.process),
        "local": report.bytes_local,
        "peer": report.bytes_peer,
        "persistent": report.bytes_persistent,
        "served": bytes_served(records),
        "ranges": big_ranges,
        "state_bytes": sum(
            np.prod(leaf.shape, dtype=int) * jax.numpy.dtype(leaf.dtype).itemsize
            for name, leaf in found.items()
            if name.startswith("big")
        ).item(),
    }


def restore_then_from_ram(world: JobProcess) -> Any:
    """The second restore needs no storage: the first has put all of it into RAM."""
    return [restore(world, local_save_every=5) for _ in range(2)]


if __name__ == "__main__":
    run_program(programs_of(globals()))
