"""Snapshots that pass through staging memory, as on accelerators, in a job of one process."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from world import LONG_S, World, finish

from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.events import Event

WAIT: dict[str, Any] = {"device_reads": "pinned_host", "buffers": Buffers(40)}


@partial(jax.jit, donate_argnums=0)
def donating_step(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: array + 1 for name, array in arrays.items()}


def donate(state: dict[str, Any]) -> None:
    arrays = {name: value for name, value in state.items() if isinstance(value, jax.Array)}
    jax.block_until_ready(donating_step(arrays))


@jax.jit
def long_step(array: jax.Array, rounds: int) -> jax.Array:
    """Compute, with hundreds of rounds for far longer than a copy of the result takes."""

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 1, jnp.sin(carry[1] @ carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < rounds, body, (jnp.int32(0), array))[1]


@pytest.mark.dear
@pytest.mark.parametrize(
    "settings", [{"device_reads": "pinned_host"}, {}], ids=["transfers", "views"]
)
def test_wait_for_arrays_still_computed_is_no_stall(world: World, settings: Any) -> None:
    start = jnp.ones((300, 300))
    long_step(start, 1).block_until_ready()
    with world.open_both(**settings) as checkpointer:
        assert checkpointer.save(step=1, state={"w": start}, force=True)
        checkpointer.wait_until_finished()
        array: Any = long_step(start, 300)
        assert not array.is_ready()
        assert checkpointer.save(step=2, state={"w": array}, force=True)
        finish(checkpointer)
    captured = [e.fields for e in world.events if e.name == "save.captured"]
    spent = {
        tier: [each for each in captured if (each["step"], each["tier"]) == (2, tier)]
        for tier in ("local", "persistent")
    }
    ((local,), (persistent,)) = spent.values()
    assert local["ready_seconds"] > local["seconds"] - local["waited_seconds"] >= 0
    assert persistent["seconds"] >= 0


def test_slow_snapshot_fails_the_save_and_training_goes_on(world: World) -> None:
    with world.open() as checkpointer:
        checkpointer.save(step=1, state=world.state(1), host_state=1)
        checkpointer.wait_until_finished()
    reached, release = threading.Event(), threading.Event()

    def hold_up(event: Event) -> None:
        if event.point == "save.stage.invalidated":
            reached.set()
            release.wait(LONG_S)

    with world.open(**WAIT, on_event=hold_up, save_timeout_s=1.0) as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 1
        state = world.state(2)
        assert checkpointer.save(step=2, state=state, host_state=2)
        assert reached.wait(LONG_S)
        donate(state)
        release.set()
        checkpointer.wait_until_finished(LONG_S)
        with pytest.raises(SaveFailed, match="step 2"):
            checkpointer.check_for_errors()
    with world.open() as checkpointer:
        world.restores(1, by=checkpointer)
