"""Device to host: the right bytes, whatever happens to the state afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from state_samples import (
    Memory,
    box_of,
    mesh_of,
    read_state,
    shard_of,
    sharded,
)

from emergency_ckpt.errors import StateMismatch
from emergency_ckpt.state import BoxTable, SnapshotRecipe, describe
from emergency_ckpt.state.link import find_link


def recipe_for(state: Any) -> tuple[SnapshotRecipe, tuple[Any, ...]]:
    tree = describe(state, "save")
    wanted = BoxTable(tree, 1).shards_of(0)
    return SnapshotRecipe(tree, wanted, find_link()), wanted


def take(state: Any) -> dict[Any, np.ndarray]:
    wanted = BoxTable(describe(state, "save"), 1).shards_of(0)
    return dict(zip(wanted, read_state(state), strict=True))


@pytest.mark.parametrize("order", [range(8), [6, 1, 4, 3, 0, 7, 2, 5]], ids=["plain", "permuted"])
@pytest.mark.parametrize("spec", [("x",), (None, "y"), ("y", "x"), (("x", "y"),), (("y", "x"),)])
def test_each_view_is_the_part_of_the_array_that_its_box_says(order: Any, spec: Any) -> None:
    whole = np.arange(64, dtype=np.int32).reshape(8, 8)
    array = sharded(whole, mesh_of(4, 2, order=list(order)), *spec)
    views = take({"w": array})
    assert {shard.box for shard in views} == {
        box_of(shard.index, whole.shape) for shard in array.addressable_shards
    }
    for shard, view in views.items():
        part = tuple(slice(start, stop) for start, stop in shard.box)
        np.testing.assert_array_equal(view, whole[part])


def test_host_values_are_copied() -> None:
    array = np.arange(4)
    views = take({"a": array, "b": 7, "c": np.float16(0.5)})
    array += 100
    assert views[shard_of("a", (0, 4))].tolist() == [0, 1, 2, 3]
    assert views[shard_of("b")].item() == 7
    assert views[shard_of("c")].dtype == np.float16


def test_byte_order_is_the_machines() -> None:
    views = take({"a": np.array([1.5, -2.0], ">f4")})
    assert views[shard_of("a", (0, 2))].tobytes() == np.array([1.5, -2.0], np.float32).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spec", "devices"), [((), 8), (("x",), 8), ((None, "x"), 8), ((), 1), (("x",), 1)]
)
def test_views_stay_as_they_are_when_the_state_is_donated(
    spec: Any, devices: int, dtype: str
) -> None:
    """Many steps, each gives away the state whose snapshot was just taken."""
    mesh = mesh_of(devices)
    state = {
        "w": sharded(np.zeros((64, 64), dtype), mesh, *spec),
        "n": sharded(np.zeros((), np.int32), mesh),
        "keys": jax.random.wrap_key_data(sharded(np.array([3, 4], np.uint32), mesh)),
    }
    recipe, wanted = recipe_for(state)
    tree = describe(state, "save")

    @partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            "w": state["w"] + 1.0,
            "n": state["n"] + 1,
            "keys": jax.random.fold_in(state["keys"], 1),
        }

    kept = []
    for number in range(12):
        flat = jax.tree_util.tree_leaves(state)
        keys = np.array(jax.random.key_data(state["keys"]))
        kept.append((number, keys, recipe.take(flat)))
        del flat
        state = jax.block_until_ready(step(state))
    for number, keys, snapshot in kept:
        for shard, view in zip(wanted, Memory(tree, wanted).read(snapshot), strict=True):
            if shard.leaf == "keys":
                np.testing.assert_array_equal(view, keys)
            else:
                assert (view == number).all(), (shard, number)


def test_box_that_is_not_here_is_refused() -> None:
    tree = describe({"w": sharded(np.zeros((8, 2)), mesh_of(8), "x")}, "save")
    with pytest.raises(StateMismatch, match="not on this process"):
        SnapshotRecipe(tree, [shard_of("w", (0, 2), (0, 2))], find_link())


def test_only_the_wanted_shards_are_taken_in_the_wanted_order() -> None:
    whole = np.arange(16, dtype=np.int8).reshape(8, 2)
    state = {"w": sharded(whole, mesh_of(8), "x"), "other": 5}
    wanted = [shard_of("w", (6, 7), (0, 2)), shard_of("w", (1, 2), (0, 2))]
    views = read_state(state, wanted)
    assert [view.tolist() for view in views] == [[[12, 13]], [[2, 3]]]
