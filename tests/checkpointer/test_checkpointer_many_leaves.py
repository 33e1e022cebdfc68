"""States of hundreds of leaves of all kinds, of which ``save`` may keep nothing that can change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import World, finish, same

from emergency_ckpt.errors import InvalidState

PER_KIND = 40
"""Layers of a state of 280 leaves: 256 were once a bound."""
LAYERS = 15


def state_of(world: World, step: int, layers: int = PER_KIND) -> dict[str, Any]:
    """Equal for equal steps; what is on devices is sharded, replicated, or on one device."""
    values = np.arange(32).reshape(8, 4)

    def put(number: int, dtype: str, *spec: Any) -> jax.Array:
        whole = (values + number + step).astype(jnp.dtype(dtype))
        return jax.device_put(whole, NamedSharding(world.mesh, P(*spec)))

    def kinds(number: int) -> dict[str, Any]:
        return {
            "sharded": put(number, "float32", "fsdp"),
            "columns": put(number, "bfloat16", None, "fsdp"),
            "replicated": put(number, "bfloat16"),
            "whole": put(number, "int32"),
            "alone": jnp.full((3,), number + step, jnp.float32),
            "numpy": values + number + step,
            "number": number + step,
        }

    return {
        "layers": [kinds(number) for number in range(layers)],
        "keys": jax.random.split(jax.random.key(step), 3),
    }


def _is_keys(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@jax.jit(donate_argnums=0)
def _donated(leaf: jax.Array) -> jax.Array:
    return leaf + leaf.dtype.type(1)


def train(state: Any) -> Any:
    """Give the device arrays away, and change those of numpy in place."""

    def after(leaf: Any) -> Any:
        if _is_keys(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return _donated(leaf)
        leaf += 1
        return leaf

    return jax.block_until_ready(jax.tree.map(after, state))


@pytest.mark.dear
@pytest.mark.parametrize("interval", [0, 1], ids=["to RAM", "to both tiers"])
def test_saved_is_what_the_state_was_at_the_call(world: World, interval: int) -> None:
    with world.open_both(save_every=interval) as checkpointer:
        state = state_of(world, 0, LAYERS)
        for step in (1, 2, 3):
            state = {**train(state), "keys": jax.random.split(jax.random.key(step), 3)}
            assert checkpointer.save(step=step, state=state)
        train(state)
        finish(checkpointer)
    if interval:
        world.lose_ram()
    with world.open_both() as checkpointer:
        step, restored = checkpointer.restore(state=state_of(world, 0, LAYERS))
    assert step == 3
    assert same(restored, state_of(world, 3, LAYERS))


@pytest.mark.dear
def test_garbage_of_the_program_ends_beside_saves(world: World) -> None:
    """Cycles that the training loop leaves are collected as if nothing were saved."""
    ended = 0

    class Cycle:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            nonlocal ended
            ended += 1

    steps, each = 60, 400
    state = state_of(world, 0)
    with world.open() as checkpointer:
        for step in range(1, steps + 1):
            for _ in range(each):
                Cycle()
            assert checkpointer.save(step=step, state=state)
            checkpointer.wait_until_finished()
    assert ended > steps * each / 2


@pytest.mark.dear
def test_deleted_leaf_among_many_is_named(world: World) -> None:
    with world.open() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step=step, state=state_of(world, step))
        for step, kind in enumerate(("sharded", "replicated", "alone"), 3):
            state = state_of(world, step)
            state["layers"][PER_KIND - 1][kind].delete()
            with pytest.raises(InvalidState, match=f"layers/{PER_KIND - 1}/{kind}.*deleted"):
                checkpointer.save(step=step, state=state)
        finish(checkpointer)
    with world.open() as checkpointer:
        step, restored = checkpointer.restore(state=state_of(world, 0))
    assert step == 2
    assert same(restored, state_of(world, 2))


@pytest.mark.dear
def test_state_may_change_its_structure_at_each_save(world: World) -> None:
    """A leaf more, other shapes, dtypes and shardings, and back, between steps that are alike."""

    def other(number: int) -> dict[str, Any]:
        state = train(state_of(world, number - 1, layers=2))
        state["keys"] = jax.random.split(jax.random.key(number), 3)
        layer = state["layers"][-1]
        changes: dict[int, dict[str, Any]] = {
            3: {"more": jnp.ones(2)},
            4: {"sharded": jax.device_put(np.ones((8, 4), np.float32), layer["whole"].sharding)},
            5: {"whole": layer["whole"].astype(jnp.int16)},
            6: {"numpy": np.ones(3)},
            7: {"alone": jnp.zeros((4,))},
        }
        layer.update(changes.get(number, {}))
        return state

    for last in range(2, 9):
        with world.open(run_id=f"up_to_{last}") as checkpointer:
            for step in range(1, last + 1):
                assert checkpointer.save(step=step, state=other(step))
                checkpointer.wait_until_finished()
            checkpointer.check_for_errors()
        with world.open(run_id=f"up_to_{last}") as checkpointer:
            step, restored = checkpointer.restore(state=other(last))
        assert step == last
        assert same(restored, other(last))
