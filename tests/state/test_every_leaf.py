"""Every kind of leaf through both tiers, bit for bit; what would come back different is refused."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from state_samples import DEVICE_DTYPES, WIDE_DTYPES, assert_same, placed, random_bits
from world import World, finish

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state import dtype_named

TIERS = ("local", "persistent")
HOST_DTYPES = tuple(
    name
    for name in (*DEVICE_DTYPES, *WIDE_DTYPES, "int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
    if hasattr(np, name) or hasattr(ml_dtypes, name)
)


def _through(world: World, tier: str, state: Any, like: Any) -> Any:
    """Save ``state``, then restore into ``like`` from that tier alone."""
    every = {"local": {}, "persistent": {"local_save_every": 0, "save_every": 1}}
    with world.open_both(**every[tier]) as checkpointer:
        assert checkpointer.save(step=1, state=state)
        finish(checkpointer)
    with world.open_both(**every[tier]) as checkpointer:
        step, found = checkpointer.restore(state=like)
        assert step == 1
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.tier == tier
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_every_dtype_comes_back_bit_for_bit(world: World, tier: str) -> None:
    split = NamedSharding(world.mesh, P("fsdp"))
    values = {name: random_bits((8, 3), name, seed) for seed, name in enumerate(HOST_DTYPES)}
    state = {
        "host": values,
        "device": {name: placed(values[name], split) for name in DEVICE_DTYPES},
        "one": {name: values[name][0, 0] for name in HOST_DTYPES},
    }
    like = jax.tree.map(np.zeros_like, {"host": values, "one": state["one"]})
    like["one"] = {name: np.zeros((), dtype_named(name))[()] for name in HOST_DTYPES}
    like["device"] = {
        name: jax.ShapeDtypeStruct((8, 3), dtype_named(name), sharding=split)
        for name in DEVICE_DTYPES
    }
    assert_same(_through(world, tier, state, like), state)


def test_dtypes_that_are_tried_are_all_there_are() -> None:
    made = {n for n in DTYPE_ITEM_BYTES if hasattr(np, n) or hasattr(ml_dtypes, n)}
    assert made == set(HOST_DTYPES)


@pytest.mark.parametrize("tier", TIERS)
def test_numpy_leaf_of_foreign_byte_order_keeps_bytes(world: World, tier: str) -> None:
    state = {
        "swapped": np.array([1.5, -0.0, np.nan], ">f4"),
        "scalar": np.array([7], ">i8")[0],
        "columns": np.asfortranarray(np.arange(6, dtype=">u2").reshape(2, 3)),
        "every second": np.arange(8, dtype=">c8")[::2],
    }
    like = {name: np.zeros_like(value) for name, value in state.items()}
    like["scalar"] = np.zeros(1, ">i8")[0]
    found = _through(world, tier, state, like)
    for name, value in state.items():
        assert found[name].dtype.str == value.dtype.str, name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    "leaf",
    [
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        np.zeros((1, 2)).view(np.matrix),
        np.rec.array([1.0, 2.0]),
        np.array(["text"]),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]),
        np.array([1, 2], "datetime64[s]"),
        np.array([None]),
        np.array([1.0], np.longdouble),
        1 << 70,
        "text",
    ],
    ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}",
)
def test_leaf_that_would_come_back_different_is_refused(world: World, leaf: Any) -> None:
    with (
        world.open_both(save_every=1) as checkpointer,
        pytest.raises(InvalidState, match="leaf 'odd'"),
    ):
        checkpointer.save(step=1, state={"odd": leaf, "w": np.zeros(3)})
    assert "save.started" not in world.names()
