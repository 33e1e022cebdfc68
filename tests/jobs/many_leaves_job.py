"""A job of two processes, a slice of two devices each, whose state has 20,000 leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job_process import JobProcess, finish, mesh_of, programs_of, run_program
from restoring import lose

LEAVES = 20_000
IN_NUMPY = 500
"""So many of them are numpy arrays, which the step changes in place."""
SHAPE = (4, 6)
STEPS = 3
ADDED = {"uint32": 2654435761, "uint8": 77, "bfloat16": 1}
"""What a step adds to each element; integers wrap around. bfloat16 is exact up to 256."""


def expected_leaf(number: int, step: int) -> np.ndarray:
    dtype, added = list(ADDED.items())[number % len(ADDED)]
    values = np.arange(np.prod(SHAPE), dtype=np.uint64).reshape(SHAPE)
    if dtype == "bfloat16":
        return ((values + number) % 100 + step).astype(ml_dtypes.bfloat16)
    return ((values + number + step) * np.uint64(added)).astype(dtype)


def placed(number: int, mesh: Mesh) -> NamedSharding | None:
    """Every second array is sharded inside its slice, in either dimension."""
    if number < IN_NUMPY:
        return None
    return NamedSharding(mesh, (P("fsdp"), P(), P(None, "fsdp"), P())[number % 4])


def state_at(step: int, mesh: Mesh) -> dict[str, Any]:
    def leaf(number: int) -> Any:
        whole, sharding = expected_leaf(number, step), placed(number, mesh)
        if sharding is None:
            return whole
        return jax.make_array_from_callback(SHAPE, sharding, lambda index: whole[index])

    return {f"layer_{number:05}": {"kernel": leaf(number)} for number in range(LEAVES)}


def specs_on(mesh: Mesh) -> dict[str, Any]:
    def spec(number: int) -> Any:
        sharding, like = placed(number, mesh), expected_leaf(number, 0)
        return (
            like if sharding is None else jax.ShapeDtypeStruct(SHAPE, like.dtype, sharding=sharding)
        )

    return {f"layer_{number:05}": {"kernel": spec(number)} for number in range(LEAVES)}


# One program for each kind of leaf, and not one of 20,000 arguments.
@jax.jit(donate_argnums=0)
def _added(leaf: jax.Array) -> jax.Array:
    return leaf + np.array(ADDED[leaf.dtype.name], leaf.dtype)


def train_step(state: dict[str, Any]) -> dict[str, Any]:
    """Consume the arrays on devices, and change those of numpy in place."""

    def after(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return _added(leaf)
        leaf += np.array(ADDED[leaf.dtype.name], leaf.dtype)
        return leaf

    return jax.tree.map(after, state)


def train(world: JobProcess, name: str, **settings: Any) -> None:
    """Save after each step; the next one begins at once."""
    mesh = mesh_of(world.slices)
    with world.config(name, **_patient(mesh, **settings)).instantiate() as ckpt:
        assert ckpt.restore(state=specs_on(mesh))[0] is None
        state = state_at(0, mesh)
        for step in range(1, STEPS + 1):
            state = train_step(state)
            assert ckpt.save(step=step, state=state)
        train_step(state)
        finish(ckpt)
        world.meet()


def restore(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    mesh = mesh_of(world.slices)
    with world.config(name, **_patient(mesh, **settings)).instantiate() as ckpt:
        step, state = ckpt.restore(state=specs_on(mesh))
        report = ckpt.last_restore
        assert step is not None
        assert report is not None
        world.meet()
    return {
        "step": step,
        "tier": report.tier,
        "from_peers": report.bytes_peer > 0,
        "differences": list(differences(state, step))[:10],
    }


def differences(state: dict[str, Any], step: int) -> Iterator[str]:
    for number in range(LEAVES):
        leaf, whole = state[f"layer_{number:05}"]["kernel"], expected_leaf(number, step)
        if isinstance(leaf, np.ndarray):
            parts = [(whole, leaf)]
        else:
            parts = [(whole[part.index], part.data) for part in leaf.addressable_shards]
        for right, mine in parts:
            if (mine.dtype, np.asarray(mine).tobytes()) != (right.dtype, right.tobytes()):
                yield f"leaf {number}: {np.asarray(mine)[:1]}"


def _patient(mesh: Mesh, **settings: Any) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "local_save_every": 1,
        "save_timeout_s": 120,
        "storage_wait_timeout_s": 120,
        "restore_timeout_s": 120,
        **settings,
    }


def host_lost(world: JobProcess) -> Any:
    train(world, "host_lost")
    lose(world, "host_lost", 1)
    return restore(world, "host_lost")


def all_ram_lost(world: JobProcess) -> Any:
    storage = {"dir": str(world.root / "persistent"), "save_every": STEPS}
    train(world, "all_ram_lost", **storage)
    lose(world, "all_ram_lost", 0, 1)
    return restore(world, "all_ram_lost", **storage)


if __name__ == "__main__":
    run_program(programs_of(globals()))
