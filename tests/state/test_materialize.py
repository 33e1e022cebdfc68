"""Bytes to devices, and the whole way there and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P
from state_samples import (
    DEVICE_DTYPES,
    WIDE_DTYPES,
    Layer,
    Pair,
    assert_same,
    mesh_of,
    placed,
    random_bits,
    read_state,
    sharded,
    through_bytes,
)

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.state import BoxTable, describe, dtype_named
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.types import ShardId


def test_every_container_comes_back() -> None:
    state = {
        "layer": Layer(jnp.arange(3), None),
        "pair": Pair([1, 2.5], (True, {})),
        "odd/key/\0": {"": jnp.float32(1)},
        "numpy": np.arange(2),
        "generic": np.float16(0.5),
        "wide": np.float64(0.25),
    }
    assert_same(through_bytes(state), state)


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfers_of_a_restore_are_allowed_whatever_the_guard(level: str) -> None:
    state = {"x": sharded(np.arange(8.0), mesh_of(2, 4), "y"), "key": jax.random.key(7), "n": 1}
    with jax.transfer_guard(level):
        restored = through_bytes(state)
    assert_same(restored, state)


def test_eight_byte_types_come_back_without_x64() -> None:
    """JAX makes arrays of 4-byte types of them where x64 is off, and says nothing."""
    assert not jax.config.jax_enable_x64
    with jax.enable_x64(True):
        state = {"third": sharded(np.arange(8) / 3, mesh_of(2, 4), "y"), "n": jnp.int64(1 << 40)}
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    for like in (state, shapes):
        assert_same(through_bytes(state, like), state)


@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (16,), (8, 4)], ids=str)
def test_every_dtype_comes_back_from_the_devices(dtype: str, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(2, 4)
    spec = [None] * len(shape)
    if shape and shape[0] in (8, 16):
        spec[0] = ("y", "x")
    state = {"x": sharded(random_bits(shape, dtype, seed=2), mesh, *spec)}
    assert_same(through_bytes(state), state)


@pytest.mark.parametrize("dtype", DEVICE_DTYPES + WIDE_DTYPES)
def test_every_dtype_comes_back_on_the_host(dtype: str) -> None:
    whole = random_bits((5, 3), dtype, seed=3)
    state = {"array": whole, "one": whole[2, 1], "empty": whole[:0], "point": whole[0, 0:1][0]}
    assert_same(through_bytes(state), state)


@pytest.mark.parametrize("value", [0, -1, (1 << 63) - 1, -(1 << 63), 1 << 63, True, False])
def test_numbers_come_back_as_they_were(value: int) -> None:
    assert_same(through_bytes({"n": value}), {"n": value})


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, float("inf"), float("nan"), 0.1])
def test_floats_come_back_bit_for_bit(value: float) -> None:
    assert_same(through_bytes({"n": value}), {"n": value})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (8,), (2, 4)])
def test_keys_come_back_as_keys(impl: str, shape: tuple[int, ...]) -> None:
    key = jax.random.key(7, impl=impl)
    state = {"k": jax.random.split(key, shape) if shape else key}
    back = through_bytes(state)
    assert_same(back, state)
    assert jax.random.key_impl(back["k"]) == jax.random.key_impl(state["k"])
    assert jax.random.bits(back["k"].reshape(-1)[0]) == jax.random.bits(state["k"].reshape(-1)[0])


def test_sharded_keys_come_back() -> None:
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 8)))
    state = {"k": jax.random.wrap_key_data(sharded(data, mesh_of(8), "x"))}
    assert_same(through_bytes(state), state)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_layout_on_a_device_is_that_of_the_target(order: tuple[int, ...]) -> None:
    plain = sharded(random_bits((8, 4, 3), "bfloat16", seed=1), mesh_of(2, 4), "y", "x")
    turned = jax.device_put(plain, Format(Layout(order), plain.sharding))
    spec = jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=turned.format)
    for state in (plain, turned):
        for like, wanted in ((plain, plain), (turned, turned), (spec, turned)):
            assert_same(through_bytes({"x": state}, {"x": like}), {"x": wanted})


def test_array_on_one_other_device_comes_back_there() -> None:
    state = {"x": jax.device_put(np.arange(5, dtype=np.int8), jax.devices()[5])}
    assert_same(through_bytes(state), state)


def test_type_of_a_host_value_is_that_of_the_given_state() -> None:
    state = {"a": np.float32(1.5), "b": np.arange(2), "c": 3}
    like = {"a": np.zeros((), np.float32), "b": np.zeros(2, int), "c": 0}
    back = through_bytes(state, like)
    assert isinstance(back["a"], np.ndarray)
    assert back["a"].shape == ()
    assert_same({k: back[k] for k in "bc"}, {k: state[k] for k in "bc"})


def test_host_array_is_the_callers_own() -> None:
    data = np.frombuffer(bytes(16), np.uint8)
    like = {"x": np.zeros(2)}
    back = materialize(describe(like, "restore"), like, lambda _: data)
    back["x"][:] = 1


@pytest.mark.parametrize("memory", [None, "pinned_host", "unpinned_host"])
def test_memory_of_a_shard_may_be_written_again_afterwards(memory: str | None) -> None:
    """On CPU JAX takes aligned memory for an array's own: a restore gives it a copy."""
    sharding = jax.sharding.NamedSharding(mesh_of(2, 4), P("y"))
    if memory is not None:
        sharding = sharding.with_memory_kind(memory)
    whole = np.arange(4096, dtype=np.float32).reshape(8, 512)
    like = {"w": jax.device_put(whole, sharding), "host": np.arange(3)}
    tree = describe(like, "restore")
    slot = np.zeros(2 * whole.nbytes, np.uint8)
    slot = slot[-slot.ctypes.data % 64 :]
    taken = 0

    def bytes_of(shard: ShardId) -> np.ndarray:
        nonlocal taken
        values = np.arange(3) if shard.leaf == "host" else whole[slice(*shard.box[0])]
        data, offset = values.reshape(-1).view(np.uint8), taken
        taken += -(-data.nbytes // 64) * 64
        slot[offset : offset + data.nbytes] = data
        view = slot[offset : offset + data.nbytes]
        view.flags.writeable = False
        return view

    back = materialize(tree, like, bytes_of)
    slot[:] = 255
    assert_same(back, like)


def test_small_leaves_go_to_the_devices_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"leaf {n}": sharded(np.arange(8) + n, mesh_of(4), "x") for n in range(50)}
    tree = describe(state, "restore")
    kept = {
        ShardId(spec, ((2 * at, 2 * at + 2),)): np.asarray(array)[2 * at : 2 * at + 2].view(
            np.uint8
        )
        for spec, array in state.items()
        for at in range(4)
    }
    calls: list[int] = []
    device_put = jax.device_put

    def counted(values: Any, *args: Any, **settings: Any) -> Any:
        calls.append(len(values))
        return device_put(values, *args, **settings)

    monkeypatch.setattr(jax, "device_put", counted)
    assert_same(materialize(tree, state, kept.__getitem__, [tuple(kept)]), state)
    assert calls == [200]


@pytest.mark.parametrize("name", DTYPE_ITEM_BYTES)
def test_each_dtype_that_is_stored_has_a_name_and_a_size(name: str) -> None:
    assert dtype_named(name).itemsize == DTYPE_ITEM_BYTES[name]
    assert dtype_named(name).name == name


@pytest.mark.parametrize(
    "name", ["", "object", "V", "str", "float7", "finfo", "iinfo", "i4,f4", ",f4", "(2,)f4"]
)
def test_other_names_are_no_dtypes(name: str) -> None:
    with pytest.raises(CorruptData):
        dtype_named(name)


AXES = {"x": 2, "y": 4}


@st.composite
def arrays(draw: st.DrawFn) -> jax.Array:
    """Any shape, dtype, partition and order of devices."""
    names = draw(st.permutations([None, "x", "y", None]))
    rank = draw(st.integers(0, 3))
    spec: list[Any] = list(names[:rank])
    if rank and draw(st.booleans()):
        spec = [None] * rank
        spec[draw(st.integers(0, rank - 1))] = draw(st.sampled_from([("x", "y"), ("y", "x")]))
    shape: list[int] = []
    for axis in spec:
        used = () if axis is None else (axis,) if isinstance(axis, str) else axis
        parts = int(np.prod([AXES[name] for name in used]))
        shape.append(parts * draw(st.integers(0, 3)))
    whole = random_bits(shape, draw(st.sampled_from(DEVICE_DTYPES)), draw(st.integers(0, 1 << 30)))
    mesh = mesh_of(2, 4, order=draw(st.permutations(range(8))))
    return placed(whole, jax.sharding.NamedSharding(mesh, P(*spec)))


@st.composite
def host_values(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        numbers = st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats()
        return draw(numbers)
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    whole = random_bits(shape, draw(st.sampled_from(DEVICE_DTYPES + WIDE_DTYPES)), 5)
    return whole.T if draw(st.booleans()) else whole


@pytest.mark.dear
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="/", codec="utf-8")),
        st.lists(arrays() | host_values(), max_size=3),
    )
)
def test_whatever_the_state_it_comes_back(state: dict[str, list[Any]]) -> None:
    assert_same(through_bytes(state), state)


def in_jax(dtype: type) -> bool:
    try:
        return jax.eval_shape(lambda: jnp.zeros(1, dtype)).dtype == dtype
    except TypeError:
        return False


def test_every_extension_type_that_jax_takes_is_known() -> None:
    """A new type of ml_dtypes must be put into the table of sizes, once JAX has arrays of it."""
    types = {
        name
        for name in dir(ml_dtypes)
        if isinstance(getattr(ml_dtypes, name), type)
        and not name.startswith("_")
        and name not in ("finfo", "iinfo")
        and in_jax(getattr(ml_dtypes, name))
    }
    assert "bfloat16" in types
    assert types <= set(DTYPE_ITEM_BYTES)


def test_leaves_go_to_the_devices_as_they_arrive() -> None:
    """Each is made before the next has come; what never arrives is asked for at the end."""
    mesh = mesh_of(4)
    state = {name: sharded(np.arange(8) + index, mesh, "x") for index, name in enumerate("abc")}
    state["host"] = np.arange(3)
    tree = describe(state, "restore")
    wanted = BoxTable(tree, 1).shards_of(0)
    views = read_state(state)
    kept = dict(zip(wanted, views, strict=True))
    here: list[ShardId] = []
    asked: list[ShardId] = []

    def bytes_of(shard: ShardId) -> np.ndarray:
        assert shard in here or over
        asked.append(shard)
        return np.ascontiguousarray(kept[shard]).reshape(-1).view(np.uint8).copy()

    of_devices = [shard for shard in wanted if shard.leaf != "host"]
    coming, late = of_devices[::-1][:9], of_devices[::-1][9:]
    over = False

    def arrivals() -> Iterator[list[ShardId]]:
        nonlocal over
        for shard in coming:
            here.append(shard)
            yield [shard, ShardId("another", shard.box)]
            whole = [leaf for leaf in "abc" if sum(each.leaf == leaf for each in here) == 4]
            assert set(asked) == {each for each in here if each.leaf in whole}
        over = True

    assert_same(materialize(tree, state, bytes_of, arrivals()), state)
    assert set(asked[8:]) == {coming[8], *late, ShardId("host", ((0, 3),))}
    assert len(asked) == len(set(asked))


def test_array_in_memory_of_the_host_comes_back_there() -> None:
    sharding = sharded(np.zeros(8), mesh_of(4), "x").sharding.with_memory_kind("pinned_host")
    whole = jax.device_put(np.arange(8, dtype=np.int32), sharding)
    whole_everywhere = jax.device_put(
        np.arange(3), jax.sharding.NamedSharding(mesh_of(8), P(), memory_kind="pinned_host")
    )
    state = {"x": whole, "y": whole_everywhere}
    back = through_bytes(state)
    assert_same(back, state)
    assert {leaf.sharding.memory_kind for leaf in back.values()} == {"pinned_host"}
