"""The states of the libraries that people train with, through both tiers and every face."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from world import World, finish

from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import InvalidState, StateMismatch

pytestmark = pytest.mark.dear  # whichever test is first imports the libraries

INPUTS = jnp.ones((2, 3))


def flax_train_state(seed: int) -> TrainState:
    model = linen.Dense(4)
    params = model.init(jax.random.key(seed), INPUTS)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)


def flax_nnx(seed: int) -> Any:
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
    return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))


def equinox(seed: int) -> Any:
    model = eqx.nn.MLP(3, 4, 5, 1, key=jax.random.key(seed))
    return eqx.filter(model, eqx.is_array)


def haiku(seed: int) -> Any:
    def net(inputs: Any) -> Any:
        return hk.nets.MLP([5, 4])(inputs)

    return hk.transform(net).init(jax.random.key(seed), INPUTS)


OPTIMIZER = optax.adam(1e-3)
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
WRAPPERS = {
    "multi steps": optax.MultiSteps(OPTIMIZER, 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "chain": optax.chain(optax.clip(1.0), optax.masked(OPTIMIZER, {"w": True, "b": False})),
    "finite": optax.apply_if_finite(OPTIMIZER, 3),
    "partition": optax.partition({"a": OPTIMIZER, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "lookahead": optax.ema(0.9),
}


def optax_wrappers(seed: int) -> Any:
    params = jax.tree.map(lambda x: x + seed, PARAMS)
    states: dict[str, Any] = {name: each.init(params) for name, each in WRAPPERS.items()}
    for name, each in WRAPPERS.items():
        _, states[name] = each.update(params, states[name], params)
    return states


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: Any
    best: float
    seen: int
    name: str = dataclasses.field(metadata={"static": True}, default="a")


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    """Registered the old way: its children have numbers for names."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> WithoutKeys:
        return cls(*children)


def containers(seed: int) -> Any:
    arrays = jnp.arange(4.0) + seed
    return {
        "named": Pair(arrays, (arrays + 1, None, [])),
        "dataclass": Registered(arrays, 0.5 * seed, seed),
        "without": WithoutKeys(arrays, {"x": seed}),
        "keys": jax.random.key(seed),
    }


STATES = [flax_train_state, flax_nnx, equinox, haiku, optax_wrappers, containers]
Build = Callable[[int], Any]


def stepped(state: Any) -> Any:
    """As a jitted training step gives it back: Python numbers are arrays then."""
    return jax.jit(lambda s: s)(state)


def _numbers(value: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def assert_values(found: Any, expected: Any, like: Any) -> None:
    """The values of one in the structure of ``like``, its Python numbers among them."""
    assert jax.tree.structure(found) == jax.tree.structure(like)
    for a, b, c in zip(*map(jax.tree.leaves, (found, expected, like)), strict=True):
        np.testing.assert_array_equal(_numbers(a), _numbers(b))
        if isinstance(c, bool | int | float):
            assert type(a) is type(c)


@pytest.mark.parametrize("build", STATES, ids=lambda build: build.__name__)
@pytest.mark.parametrize("tier", ["local", "persistent"])
def test_training_state_is_restored_into_a_new_one(world: World, tier: str, build: Build) -> None:
    saved, fresh = stepped(build(1)), build(2)
    with world.open_both(mesh=None, save_every=1) as checkpointer:
        assert checkpointer.save(step=1, state=saved)
        finish(checkpointer)
    if tier == "persistent":
        world.lose_ram()
    with world.open_both(mesh=None) as checkpointer:
        step, found = checkpointer.restore(state=fresh)
        assert step == 1
        assert checkpointer.last_restore.tier == tier
        assert_values(found, saved, fresh)
        # And on from there, from Python numbers again.
        assert checkpointer.save(step=2, state=found)
        checkpointer.wait_until_finished()
        assert_values(checkpointer.restore(state=fresh)[1], saved, fresh)
        checkpointer.check_for_errors()


@pytest.mark.parametrize("build", STATES, ids=lambda build: build.__name__)
def test_training_state_of_plain_orbax_is_a_start(world: World, build: Build) -> None:
    saved, fresh = stepped(build(1)), build(2)
    with ocp.CheckpointManager(world.persistent) as manager:
        manager.save(3, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
    with world.open_both(mesh=None) as checkpointer:
        step, found = checkpointer.restore(state=fresh)
    assert step == 3
    assert_values(found, saved, fresh)


@pytest.mark.parametrize("build", STATES, ids=lambda build: build.__name__)
def test_training_state_through_the_orbax_face(world: World, build: Build) -> None:
    saved, fresh = stepped(build(1)), build(2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, with_one_slice=True),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1),
    )

    def manager() -> emergency.CheckpointManager:
        world.ramdisk.mkdir(exist_ok=True)
        return emergency.CheckpointManager(
            world.ramdisk, world.persistent, mesh, fresh, options=options
        )

    with manager() as first:
        assert first.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(saved)))
        first.wait_until_finished()
    for _ in world.each_tier():
        with manager() as again:
            assert again.latest_step() == 1
            assert_values(again.restore(None).state, saved, fresh)


@pytest.mark.parametrize("build", STATES, ids=lambda build: build.__name__)
def test_training_state_through_the_axlearn_face(
    world: World, axlearn_face: Any, build: Build
) -> None:
    config = importlib.import_module("axlearn.common.config")
    policies = importlib.import_module("axlearn.common.checkpointer")
    every_step = config.config_for_function(policies.every_n_steps_policy).set(n=1)
    saved, fresh = stepped(build(1)), build(2)

    def checkpointer() -> Any:
        cfg = axlearn_face.EmergencyCheckpointer.default_config().set(
            name="checkpointer",
            dir=str(world.persistent),
            trainer_dir=str(world.persistent),
            local_dir=str(world.ramdisk),
            save_policy=every_step,
            local_save_policy=every_step,
            replica_axis_index=0,
        )
        return cfg.instantiate(parent=None)

    first = checkpointer()
    first.save(step=1, state=saved)
    first.wait_until_finished()
    first.stop()
    for _ in world.each_tier():
        again = checkpointer()
        step, found = again.restore(state=fresh)
        again.stop()
        assert step == 1
        assert_values(found, saved, fresh)


NUMBERS = {
    "int from int32": (jnp.int32(-7), 0, -7),
    "int from uint8": (np.uint8(255), 0, 255),
    "int from uint64": (np.uint64(2**64 - 1), 0, 2**64 - 1),
    "int from int": (2**63, 0, 2**63),
    "float from bfloat16": (jnp.bfloat16(1.5), 0.0, 1.5),
    "float from float32": (np.float32(0.1), 0.0, float(np.float32(0.1))),
    "bool from bool": (np.bool_(True), False, True),
    "complex from complex64": (jnp.complex64(1 + 2j), 0j, 1 + 2j),
    "complex from complex": (1 - 2j, 0j, 1 - 2j),
    "int from an array without axes": (np.array(5, np.int16), 0, 5),
}
OTHER_KINDS = {
    "int from float": (jnp.float32(1), 0),
    "float from int": (jnp.int32(1), 0.0),
    "bool from int": (1, False),
    "int from bool": (True, 0),
    "int from one element": (np.ones(1, np.int32), 0),
    "float from complex": (1j, 0.0),
    "numpy float64 from float32": (np.float32(1), np.float64(0)),
    "array from int": (1, jnp.int32(0)),
}


@pytest.mark.parametrize("tier", ["local", "persistent"])
def test_python_number_takes_any_scalar_of_its_kind(world: World, tier: str) -> None:
    with world.open_both(mesh=None, save_every=1) as checkpointer:
        checkpointer.save(step=1, state={name: case[0] for name, case in NUMBERS.items()})
        finish(checkpointer)
    if tier == "persistent":
        world.lose_ram()
    with world.open_both(mesh=None) as checkpointer:
        _, found = checkpointer.restore(state={name: case[1] for name, case in NUMBERS.items()})
    for name, (_, like, value) in NUMBERS.items():
        assert type(found[name]) is type(like), name
        assert found[name] == value, name


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_python_number_of_another_kind_is_a_mismatch(world: World, case: str) -> None:
    saved, like = OTHER_KINDS[case]
    with world.open_both(mesh=None, save_every=1) as checkpointer:
        checkpointer.save(step=1, state={"x": saved})
        checkpointer.wait_until_finished()
    for _ in world.each_tier():
        with (
            world.open_both(mesh=None) as checkpointer,
            pytest.raises(StateMismatch, match="x: expected"),
        ):
            checkpointer.restore(state={"x": like})


def test_module_with_functions_among_its_leaves_says_what_to_do(world: World) -> None:
    model = eqx.nn.MLP(3, 4, 5, 1, key=jax.random.key(0))
    with world.open() as checkpointer, pytest.raises(InvalidState, match=r"eqx\.filter"):
        checkpointer.save(step=1, state=model)
