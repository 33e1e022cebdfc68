"""A restored array is placed as its target: also where the target is placed nowhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from world import World, finish

from emergency_ckpt.errors import InvalidState

pytestmark = pytest.mark.dear  # whichever test is first imports optax

OPTIMIZER = optax.adam(1e-3)


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(kind,))


def training_state(value: float) -> dict[str, Any]:
    """As a loop makes it: sharded weights, and counts and keys that nobody has placed."""
    w = jax.device_put(np.full((8, 4), value, np.float32), NamedSharding(mesh_of(), P("x")))
    return {
        "w": w,
        "opt": OPTIMIZER.init({"w": w}),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(int(value)),
    }


@jax.jit
def train(state: dict[str, Any]) -> dict[str, Any]:
    updates, opt = OPTIMIZER.update({"w": state["w"] * 0.5}, state["opt"])
    key, _ = jax.random.split(state["key"])
    return {
        "w": optax.apply_updates({"w": state["w"]}, updates)["w"],
        "opt": opt,
        "count": state["count"] + 1,
        "key": key,
    }


def committed(state: Any) -> list[bool]:
    return [each.committed for each in jax.tree.leaves(state)]


def equal(a: Any, b: Any) -> bool:
    def bits(tree: Any) -> list[bytes]:
        leaves = jax.tree.leaves(tree)
        keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
        plain = [jax.random.key_data(x) if k else x for x, k in zip(leaves, keys, strict=True)]
        return [np.asarray(x).tobytes() for x in plain]

    return bits(a) == bits(b)


@pytest.mark.parametrize("is_trained", [False, True])
def test_restored_state_goes_into_the_next_compiled_step(world: World, is_trained: bool) -> None:
    before = training_state(3)
    saved = train(before) if is_trained else before
    with world.open_both() as checkpointer:
        assert checkpointer.save(step=2, state=saved)
        finish(checkpointer)
    for _ in world.each_tier():
        like = training_state(0)
        with world.open_both() as checkpointer:
            step, state = checkpointer.restore(state=like)
        assert step == 2
        assert committed(state) == committed(like)
        assert False in committed(like)
        assert equal(state, saved)
        assert equal(train(state), train(saved))


def test_spec_without_sharding_is_placed_nowhere(world: World) -> None:
    with world.open_both() as checkpointer:
        assert checkpointer.save(step=2, state={"w": jnp.arange(4.0)})
        finish(checkpointer)
        like = {"w": jax.ShapeDtypeStruct((4,), np.float32)}
        _, state = checkpointer.restore(state=like)
    assert committed(state) == [False]
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_default_device_of_the_caller_is_that_of_open_arrays(world: World) -> None:
    with world.open_both() as checkpointer:
        assert checkpointer.save(step=2, state={"w": jnp.arange(4.0)})
        finish(checkpointer)
        last = jax.devices()[-1]
        with jax.default_device(last):
            _, state = checkpointer.restore(state={"w": jnp.zeros(4)})
    assert (state["w"].committed, state["w"].devices()) == (False, {last})
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_spec_of_an_abstract_mesh_is_on_the_mesh_in_force(world: World) -> None:
    mesh = mesh_of(AxisType.Explicit)
    sharding = NamedSharding(mesh, P("x"))
    value = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
    with jax.set_mesh(mesh):
        like = {"w": jax.eval_shape(lambda: value * 2)}
    assert isinstance(like["w"].sharding.mesh, jax.sharding.AbstractMesh)
    with world.open_both() as checkpointer:
        assert checkpointer.save(step=2, state={"w": value})
        finish(checkpointer)
        with pytest.raises(InvalidState, match=r"leaf 'w': its mesh has no devices.*set_mesh"):
            checkpointer.restore(state=like)
        with jax.set_mesh(mesh):
            _, state = checkpointer.restore(state=like)
    assert state["w"].sharding == sharding
    assert state["w"].tolist() == list(range(8))
