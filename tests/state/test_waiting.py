"""Waits for arrays that are not computed, as in a step whose peer has died."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_samples import Memory

from emergency_ckpt.errors import PeerLeft
from emergency_ckpt.state import staging
from emergency_ckpt.state.link import find_link
from emergency_ckpt.state.snapshot import SnapshotRecipe
from emergency_ckpt.state.staging import wait_until_ready
from emergency_ckpt.state.tree import describe
from emergency_ckpt.types import ShardId

SIZE = 1 << 18
"""JAX computes smaller arrays on CPU in the thread that asks for them."""
TURNS = 1000


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes at once: a step takes a second, and nothing here depends on it."""
    monkeypatch.setattr(staging, "_FIRST_INSPECTION_S", 0.0)


@jax.jit
def step(array: jax.Array) -> jax.Array:
    """Return ``array`` plus one, after a while."""
    slow = jax.lax.fori_loop(0, TURNS, lambda _, x: jnp.sin(x) + array, array)
    return array + 1 + 0 * slow


def give_up() -> None:
    raise PeerLeft("wait for", "the other processes", "one is silent")


@pytest.mark.dear
def test_wait_ends_with_the_arrays() -> None:
    pending = step(jnp.zeros(SIZE))
    wait_until_ready([pending, jnp.zeros(3)], staging.inspect_nothing)
    assert pending.is_ready()


@pytest.mark.dear
def test_wait_for_what_is_ready_has_no_look() -> None:
    wait_until_ready([jax.block_until_ready(step(jnp.zeros(SIZE)))], give_up)


@pytest.mark.dear
def test_wait_ends_with_the_error_of_a_look() -> None:
    pending = step(jnp.zeros(SIZE))
    with pytest.raises(PeerLeft):
        wait_until_ready([pending], give_up)
    assert np.asarray(pending)[0] == 1


@pytest.mark.dear
def test_snapshot_given_up_in_a_wait_leaves_the_state() -> None:
    state = {"w": step(jnp.zeros(SIZE))}
    wanted = [ShardId("w", ((0, SIZE),))]
    tree = describe(state, "save")
    recipe = SnapshotRecipe(tree, wanted, find_link(), inspect=give_up)
    with pytest.raises(PeerLeft):
        recipe.take([state["w"]])
    jax.block_until_ready(state)
    snapshot = recipe.take([state["w"]])
    (view,) = Memory(tree, wanted).read(snapshot)
    assert np.asarray(view)[0] == 1
    snapshot.close()


@pytest.mark.dear
def test_wait_for_a_deleted_array_is_left_to_its_reader() -> None:
    gone = jnp.zeros(SIZE)
    gone.delete()
    wait_until_ready([gone, step(jnp.zeros(SIZE))], staging.inspect_nothing)
