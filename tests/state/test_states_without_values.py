"""States that look right and hold nothing: refused at ``save``, on every process alike."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from world import World, finish, save_all

from emergency_ckpt.errors import InvalidState


def specs(state: Any) -> Any:
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )


@pytest.mark.parametrize("first", [False, True], ids=["later save", "first save"])
@pytest.mark.parametrize("interval", [0, 1], ids=["to RAM", "to both tiers"])
def test_donated_state_is_named_and_nothing_is_lost(
    world: World, interval: int, first: bool
) -> None:
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    with world.open_both(save_every=interval) as checkpointer:
        if not first:
            save_all(checkpointer, world, 1)
        state = world.state(2)
        step(state["w"])
        with pytest.raises(InvalidState, match=r"save leaf 'w'.*donated.*the step returned"):
            checkpointer.save(step=2, state=state)
        save_all(checkpointer, world, 3)
        checkpointer.check_for_errors()
    world.restores(3)


@pytest.mark.parametrize("first", [False, True], ids=["later save", "first save"])
def test_specs_are_not_taken_for_arrays(world: World, first: bool) -> None:
    with world.open() as checkpointer:
        if not first:
            save_all(checkpointer, world, 1)
        with pytest.raises(InvalidState, match="a ShapeDtypeStruct has no values"):
            checkpointer.save(step=2, state=specs(world.state(2)))
        save_all(checkpointer, world, 3)
        checkpointer.check_for_errors()


@pytest.mark.parametrize("state", [{}, [], None], ids=repr)
def test_empty_state_is_kept_in_ram_alone(world: World, state: Any) -> None:
    with world.open() as checkpointer:
        assert checkpointer.save(step=1, state=state)
        finish(checkpointer)
        assert checkpointer.restore(state=state) == (1, state)
    with (
        world.open_both(run_id="other", save_every=1) as checkpointer,
        pytest.raises(InvalidState, match="the state: it is empty"),
    ):
        checkpointer.save(step=2, state=state)
