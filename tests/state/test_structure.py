"""A plan is used again for states of the structure it was made for, and for no other."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_samples import mesh_of, sharded

from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state import describe
from emergency_ckpt.state.snapshot import StateStructure

WHOLE = np.zeros((8, 8), np.float32)


def base_state() -> dict[str, Any]:
    return {
        "array": sharded(WHOLE, mesh_of(8), "x"),
        "keys": jax.random.key(0),
        "none": None,
        "numpy": np.zeros(3),
        "number": 1,
        "small": jnp.float32(1),
    }


def structure_of(state: Any) -> StateStructure:
    return StateStructure(describe(state, "save"))


OTHERS: dict[str, list[Any]] = {
    "array": [
        sharded(WHOLE, mesh_of(8), None, "x"),
        sharded(WHOLE, mesh_of(8)),
        sharded(WHOLE.astype(np.int32), mesh_of(8), "x"),
        sharded(WHOLE.astype(jnp.bfloat16), mesh_of(8), "x"),
        sharded(np.zeros((16, 8), np.float32), mesh_of(8), "x"),
        # Another mesh of equal shape: its devices are in another order. Another mesh.
        sharded(WHOLE, mesh_of(8, order=[1, 0, 2, 3, 4, 5, 6, 7]), "x"),
        sharded(WHOLE, mesh_of(4, 2), ("x", "y")),
        jax.device_put(WHOLE),
        WHOLE,
        1,
        None,
        (),
        [WHOLE],
        {},
    ],
    "keys": [
        jax.random.key(0, impl="rbg"),
        jax.random.split(jax.random.key(0), 2),
        jax.random.PRNGKey(0),
        1,
        None,
    ],
    "none": [0, jnp.zeros(3)],
    "numpy": [np.zeros(4), np.zeros(3, np.float32), np.zeros((3, 1)), jnp.zeros(3), 1.0, None],
    "number": [1.0, True, np.int64(1), jnp.int32(1), 1 << 63, None],
    "small": [1.0, np.float32(1), jnp.int32(1), jnp.zeros(1), None],
}


@pytest.mark.parametrize("seen", [False, True], ids=["first", "again"])
def test_states_of_another_structure_are_refused(seen: bool) -> None:
    base = base_state()
    structure = structure_of(base)
    for name, values in OTHERS.items():
        for value in values:
            if seen:
                assert structure.leaves_of(base) is not None
            assert structure.leaves_of({**base, name: value}) is None, (name, value)
    assert structure.leaves_of({**base, "more": 1}) is None
    assert structure.leaves_of({k: v for k, v in base.items() if k != "keys"}) is None
    assert structure.leaves_of(list(base.values())) is None
    assert structure.leaves_of(collections.OrderedDict(base)) is None
    assert structure.leaves_of(None) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_leaf_after_steps_of_training_is_refused(name: str) -> None:
    """The arrays of two steps share the objects that describe them; a leaf among them is new."""
    states = [base_state()]
    structure = structure_of(states[0])
    step = jax.jit(lambda array: array + 1)
    for _ in range(3):
        states.append({**states[-1], **{n: step(states[-1][n]) for n in ("array", "small")}})
        assert structure.leaves_of(states[-1]) is not None
    for value in OTHERS[name]:
        assert structure.leaves_of({**states[-1], name: value}) is None, value
        assert structure.leaves_of(states[-1]) is not None


def test_leaves_come_in_the_order_of_the_tree() -> None:
    base = base_state()
    structure = structure_of(base)
    for state in (base, {**base, "array": base["array"] + 1, "number": 2}):
        found = structure.leaves_of(state)
        expected = jax.tree_util.tree_leaves(state)
        assert found is not None
        assert all(a is b for a, b in zip(found, expected, strict=True))


def test_what_a_stored_state_does_not_tell_apart_is_alike() -> None:
    """Weak types, committed arrays, numpy values of another byte order."""
    base = base_state()
    structure = structure_of(base)
    alike = [
        {"small": jnp.asarray(1.0)},  # weakly typed
        {"small": jax.device_put(jnp.float32(1), jax.devices()[0])},  # committed
        {"numpy": np.zeros(3, ">f8")},
        {"number": 7},
    ]
    for change in alike:
        assert structure.leaves_of({**base, **change}) is not None, change
        assert structure.leaves_of(base) is not None


def test_numpy_subclass_at_a_later_save_is_refused(tmp_path: Path) -> None:
    """As at the first save; a mapped file is a plain array."""
    plain = {"host": np.zeros(3)}
    structure = structure_of(plain)
    assert structure.leaves_of(plain) is not None
    mapped = np.memmap(tmp_path / "values", np.float64, "w+", shape=(3,))
    assert structure.leaves_of({"host": mapped}) is not None
    for other in (np.ma.masked_array(np.zeros(3), mask=[1, 0, 0]), np.zeros(3).view(np.recarray)):
        assert structure.leaves_of({"host": other}) is None
        with pytest.raises(InvalidState, match="would come back as a plain array"):
            describe({"host": other}, "save")


def test_subtree_that_poses_as_a_leaf_is_no_leaf() -> None:
    @jax.tree_util.register_pytree_node_class
    class Boxed:
        def __init__(self, value: Any) -> None:
            self.value = value
            self.shape, self.dtype = WHOLE.shape, WHOLE.dtype
            self.sharding = base["array"].sharding

        def tree_flatten(self) -> tuple[tuple[Any], None]:
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: tuple[Any]) -> Boxed:
            return cls(*children)

    base = base_state()
    structure = structure_of(base)
    assert structure.leaves_of(base) is not None
    assert structure.leaves_of({**base, "array": Boxed(base["array"])}) is None


def test_descriptions_are_alike_and_have_no_values() -> None:
    base = base_state()
    array = base["array"]
    spec = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    found = structure_of(base).leaves_of({**base, "array": spec})
    assert found is not None
    assert found[0] is spec
