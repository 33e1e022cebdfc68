"""A job of one process: saved in life 0; restored in life 1 from RAM, and from storage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from job_process import (
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

from emergency_ckpt.tools.job_environment import JobEnvironment


def plain_state(step: int) -> dict[str, Any]:
    """A state as small programs have it: on the default device, without mesh or sharding."""
    return {
        "weights": jax.random.normal(jax.random.key(step), (7, 3), jnp.bfloat16),
        "count": jnp.int32(step),
        "keys": jax.random.split(jax.random.key(step), 3),
        "none": jnp.zeros((0, 2)),
        "table": np.arange(5) * step,
        "rate": 0.5 * step,
    }


def plain_specs() -> dict[str, Any]:
    """Shapes and dtypes only, but for host values."""
    state = plain_state(0)
    arrays = {name: value for name, value in state.items() if isinstance(value, jax.Array)}
    return {**state, **jax.eval_shape(lambda: arrays)}


def plain_differences(state: dict[str, Any], step: int) -> list[str]:
    wanted = plain_state(step)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    return [name for name in wanted if not _same(state[name], wanted[name])]


def _same(mine: Any, right: Any) -> bool:
    if isinstance(right, jax.Array) and jax.dtypes.issubdtype(right.dtype, jax.dtypes.prng_key):
        mine, right = jax.random.key_data(mine), jax.random.key_data(right)
    a, b = np.asarray(mine), np.asarray(right)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) and isinstance(
        mine, type(right)
    )


def no_mesh(world: JobProcess) -> Any:
    if JobEnvironment.from_environ().restart_count == 0:
        return save(world, "no_mesh", plain_state)
    return restore(world, "no_mesh", plain_specs(), plain_differences)


def one_slice(world: JobProcess) -> Any:
    return on_mesh(world, "one_slice", 1)


def slices_in_one_process(world: JobProcess) -> Any:
    return on_mesh(world, "slices_in_one_process", 2)


def on_mesh(world: JobProcess, name: str, slices: int) -> Any:
    mesh = mesh_of(slices)
    if JobEnvironment.from_environ().restart_count == 0:
        return save(world, name, lambda step: state_at(step, mesh), mesh=mesh)
    wrong = lambda state, step: differences(state, step, mesh)  # noqa: E731
    return restore(world, name, specs_on(mesh), wrong, mesh=mesh)


def save(world: JobProcess, name: str, state_of: Any, **settings: Any) -> None:
    """Both tiers at steps 5 and 10; nothing of step 11 or later."""
    settings = {"dir": str(world.root / f"{name}_persistent"), "save_every": 5, **settings}
    iterator = Iterator(0)
    with world.config(name, **settings).instantiate() as ckpt:
        assert ckpt.restore(state=state_of(0), host_state=iterator)[0] is None
        for step in range(1, 13):
            ckpt.save(step=step, state=state_of(step), host_state=iterator.at(step))
        finish(ckpt)
        assert ckpt.all_steps() == [5, 10]


def restore(world: JobProcess, name: str, specs: Any, wrong: Any, **settings: Any) -> Any:
    settings = {"dir": str(world.root / f"{name}_persistent"), "save_every": 5, **settings}
    found = {}
    for tier, host in (("local", 0), ("persistent", 1)):  # host 1 has nothing
        iterator = Iterator(-1)
        with world.config(name, host=host, **settings).instantiate() as ckpt:
            step, state = ckpt.restore(state=specs, host_state=iterator)
            assert ckpt.last_restore is not None
            found[tier] = {
                "step": step,
                "tier": ckpt.last_restore.tier,
                "wrong": wrong(state, step),
                "iterator": [iterator.process, iterator.position],
            }
    return found


if __name__ == "__main__":
    run_program(programs_of(globals()))
