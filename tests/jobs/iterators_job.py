"""Data iterators of real pipelines, restored in a life on other hosts under other numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import grain_data
import jax
import jax.numpy as jnp
import numpy as np
from job_process import JobProcess, finish, mesh_of, run_program

from emergency_ckpt import CheckpointerConfig
from emergency_ckpt.tools.job_environment import JobEnvironment

LAST = 12
WIDTH = 4
Pipelines = Callable[[int, int], dict[str, Any]]


class Counter:
    """Any object with ``get_state`` and ``set_state`` will do."""

    def __init__(self, process: int) -> None:
        self._at = 1000 * process

    def __next__(self) -> int:
        self._at += 1
        return self._at

    def get_state(self) -> dict[str, Any]:
        return {"at": self._at, "seen": (self._at, b"\x00\xff", None)}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["seen"] == (state["at"], b"\x00\xff", None)
        self._at = state["at"]


def grain_iterators(process: int, count: int) -> dict[str, Any]:
    """Two kinds of Grain's, and a nesting of all, beside a number."""
    inner = Counter(process), {"deep": iter(grain_data.dataset(WIDTH, process, count))}
    return {
        "bytes": iter(grain_data.loader(WIDTH, process, count)),
        "dict": iter(grain_data.dataset(WIDTH, process, count)),
        "nested": [inner, iter(grain_data.loader(2, process, count))],
        "epoch": 0,
    }


def tf_iterators(process: int, count: int) -> dict[str, Any]:
    """Iterators of TensorFlow's, with a shuffle buffer in their state."""
    import tensorflow as tf  # noqa: PLC0415 - an extra; only the test of these has it

    def pipeline(seed: int) -> Any:
        numbers = tf.data.Dataset.range(400).shard(count, process)
        return numbers.shuffle(16, seed=seed).repeat().batch(3).prefetch(2)

    return {
        "tensors": iter(pipeline(1)),
        "nested": [(pipeline(2).as_numpy_iterator(), Counter(process))],
        "epoch": 0,
    }


def leaves(iterators: Any) -> list[Any]:
    if isinstance(iterators, dict):
        return [leaf for value in iterators.values() for leaf in leaves(value)]
    if isinstance(iterators, list | tuple):
        return [leaf for value in iterators for leaf in leaves(value)]
    return [iterators] if hasattr(iterators, "__next__") else []


def batches(iterators: Any) -> list[Any]:
    """The next batch of each."""
    return [np.asarray(next(iterator)).tolist() for iterator in leaves(iterators)]


def config(world: JobProcess, name: str, ramdisk: str) -> CheckpointerConfig:
    local_dir = JobEnvironment.from_environ().local_dir / f"{name}-{ramdisk}"
    return world.config(
        name,
        local_dir=str(local_dir),
        dir=str(world.root / "persistent" / name),
        save_every=LAST,
        local_save_every=4,
        mesh=mesh_of(world.slices),
        total_timeout_s=120,
    )


def state_on(world: JobProcess, step: int) -> dict[str, Any]:
    sharding = jax.sharding.NamedSharding(mesh_of(world.slices), jax.sharding.PartitionSpec("fsdp"))
    whole = np.full(8, step, np.float32)
    return {"w": jax.make_array_from_callback((8,), sharding, lambda index: whole[index])}


def train(world: JobProcess, name: str, pipelines: Pipelines) -> Any:
    iterators = pipelines(world.process, world.count)
    with config(world, name, "kept").instantiate() as ckpt:
        assert ckpt.restore(state=state_on(world, 0), host_state=iterators)[0] is None
        for step in range(1, LAST + 3):  # reads on behind the last save
            seen = batches(iterators)
            iterators["epoch"] = step
            ckpt.save(step=step, state=state_on(world, step), host_state=iterators)
        finish(ckpt)
        world.meet()
    return len(seen)


def restored(world: JobProcess, name: str, ramdisk: str, pipelines: Pipelines) -> Any:
    fresh = pipelines(world.process, world.count)
    before = leaves(fresh)
    with config(world, name, ramdisk).instantiate() as ckpt:
        step, state = ckpt.restore(state=state_on(world, 0), host_state=fresh)
        world.meet()
    undisturbed = pipelines(world.process, world.count)
    for _ in range(LAST):
        batches(undisturbed)
    assert ckpt.last_restore is not None
    return {
        "step": step,
        "tier": ckpt.last_restore.tier,
        "state": float(jnp.max(state["w"].addressable_data(0))),
        "epoch": fresh["epoch"],
        "in_place": all(a is b for a, b in zip(before, leaves(fresh), strict=True)),
        "next": [batches(fresh) for _ in range(3)],
        "undisturbed": [batches(undisturbed) for _ in range(3)],
    }


def programs(name: str, pipelines: Pipelines) -> dict[str, Callable[[JobProcess], Any]]:
    return {
        f"{name}_train": lambda world: train(world, name, pipelines),
        f"{name}_host_lost": lambda world: restored(world, name, "kept", pipelines),
        f"{name}_ram_lost": lambda world: restored(world, name, "empty", pipelines),
    }


if __name__ == "__main__":
    assert len(sys.argv) > 3, "name the programs"
    run_program({**programs("grain", grain_iterators), **programs("tf", tf_iterators)})
