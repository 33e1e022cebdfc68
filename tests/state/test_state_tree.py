"""From the user's pytree to leaves, boxes and shards."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from state_samples import Layer, Pair, box_of, mesh_of, shard_of, sharded

from emergency_ckpt.core.limits import MAX_DIMENSIONS
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.state import BoxTable, describe
from emergency_ckpt.state import tree as tree_module
from emergency_ckpt.state.tree import Leaf, LeafKind, boxes_by_device
from emergency_ckpt.types import Box, LeafSpec


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device of a job of several processes."""

    id: int
    process_index: int


def paths(state: Any) -> list[str]:
    return [leaf.spec.path for leaf in describe(state, "save").leaves]


def _keys(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(jax.random.key(1), shape)


def test_paths_name_every_kind_of_container() -> None:
    state = {
        "layers": [Layer(1, 2), Layer(3, 4)],
        "pair": Pair(5, None),
        "tuple": (6,),
        "by number": {7: 8},
        "none": None,
    }
    assert paths(state) == [
        "by number/7",
        "layers/0/b",
        "layers/0/w",
        "layers/1/b",
        "layers/1/w",
        "pair/first",
        "tuple/0",
    ]


@pytest.mark.parametrize("key", ["", "a/b", "ü\n", "..", "'\"", "x" * 500, " ", "\0", "%2F"])
def test_any_text_may_be_a_key(key: str) -> None:
    tree = describe({key: {"leaf": 1}}, "save")
    assert [leaf.spec.path for leaf in tree.leaves] == [f"{key}/leaf"]
    assert tree.unflatten({f"{key}/leaf": 9}) == {key: {"leaf": 9}}


@pytest.mark.parametrize(
    "state", [{"a": {"b": 1}, "a/b": 2}, {"a": {0: 1}, "a/0": 2}, {"a": [1], "a/0": 2}], ids=repr
)
def test_two_leaves_with_one_path_are_refused(state: Any) -> None:
    with pytest.raises(InvalidState, match="two leaves have this path; rename a key") as caught:
        describe(state, "save")
    assert caught.value.operation == "save"


def test_describe_of_keys_that_have_no_order_is_invalid() -> None:
    with pytest.raises(InvalidState, match="keys of one type"):
        describe({"layers": {1: np.zeros(2), "a": np.zeros(2)}}, "save")


@pytest.mark.parametrize("key", ["\ud800", "x" * 5000], ids=["no unicode", "long"])
def test_path_that_cannot_be_written_is_refused(key: str) -> None:
    with pytest.raises(InvalidState, match="its path cannot be stored"):
        describe({key: 1}, "save")


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros, _keys])
def test_leaf_of_too_many_dimensions_is_refused(make: Callable[[tuple[int, ...]], Any]) -> None:
    most = MAX_DIMENSIONS - (make is _keys)  # the data of keys have one more
    assert describe({"x": make((1,) * most)}, "save").leaves
    with pytest.raises(InvalidState, match="leaf 'x': it has too many dimensions"):
        describe({"x": make((1,) * (most + 1))}, "save")


def test_empty_state_has_no_leaves() -> None:
    for state in ({}, None, [], {"a": {}, "b": None}):
        tree = describe(state, "save")
        assert tree.leaves == ()
        assert tree.unflatten({}) == state


def test_leaves_are_sorted_by_path_and_know_their_place() -> None:
    state = Pair(first={"z": 1, "a": 2}, second=3)
    tree = describe(state, "save")
    assert [leaf.spec.path for leaf in tree.leaves] == ["first/a", "first/z", "second"]
    assert tree.unflatten({"first/a": "A", "first/z": "Z", "second": "S"}) == Pair(
        {"z": "Z", "a": "A"}, "S"
    )


@pytest.mark.parametrize(
    ("value", "kind", "dtype", "shape"),
    [
        (True, LeafKind.SCALAR, "bool", ()),
        (3, LeafKind.SCALAR, "int64", ()),
        (1 << 63, LeafKind.SCALAR, "uint64", ()),
        (0.5, LeafKind.SCALAR, "float64", ()),
        (np.float32(1), LeafKind.NUMPY, "float32", ()),
        (np.bool_(1), LeafKind.NUMPY, "bool", ()),
        (np.zeros((2, 0), np.int8), LeafKind.NUMPY, "int8", (2, 0)),
        (np.zeros(3, ml_dtypes.bfloat16), LeafKind.NUMPY, "bfloat16", (3,)),
        (np.zeros(2, ">f4"), LeafKind.NUMPY, "float32", (2,)),
    ],
)
def test_host_values(value: Any, kind: LeafKind, dtype: str, shape: tuple[int, ...]) -> None:
    (leaf,) = describe({"x": value}, "save").leaves
    assert (leaf.kind, leaf.spec) == (kind, LeafSpec("x", dtype, shape))
    assert leaf.sharding is None
    assert boxes_by_device(leaf) == {}


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("text", "type str cannot be checkpointed"),
        (b"bytes", "type bytes cannot be checkpointed"),
        (object(), "type object cannot be checkpointed"),
        (Colour.RED, "type Colour cannot be checkpointed"),
        (1 << 70, "dtype object"),
        (np.array([{}]), "dtype object"),
        (np.array(["ab"]), "dtype str"),
        (np.array([b"ab"]), "dtype bytes"),
        (np.zeros(2, "datetime64[s]"), "dtype datetime64"),
        (np.zeros(2, [("a", "i4")]), "dtype void"),
        (np.zeros(2, np.longdouble), "dtype "),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_has_no_bytes_is_refused_by_name(value: Any, problem: str) -> None:
    with pytest.raises(InvalidState, match=problem) as caught:
        describe({"good": 1, "bad": {"one": value}}, "save")
    assert caught.value.target == "leaf 'bad/one'"


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_prng_keys_are_their_data(impl: str, shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(1, impl=impl), shape) if shape else None
    keys = jax.random.key(1, impl=impl) if keys is None else keys
    (leaf,) = describe({"k": keys}, "save").leaves
    data = jax.random.key_data(keys)
    assert leaf.kind is LeafKind.KEYS
    assert leaf.spec == LeafSpec("k", "uint32", data.shape, impl)


def test_raw_keys_are_arrays() -> None:
    (leaf,) = describe({"k": jax.random.PRNGKey(0)}, "save").leaves
    assert (leaf.kind, leaf.spec) == (LeafKind.ARRAY, LeafSpec("k", "uint32", (2,)))


def test_specs_and_arrays_are_described_alike() -> None:
    mesh = mesh_of(4, 2)
    array = sharded(np.zeros((8, 4), np.float32), mesh, "x", "y")
    spec = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=array.sharding)
    assert describe({"x": array}, "save").leaves == describe({"x": spec}, "restore").leaves


def test_spec_without_sharding_is_for_one_device_of_one_process() -> None:
    (leaf,) = describe({"x": jax.ShapeDtypeStruct((2,), jnp.int8)}, "restore").leaves
    assert leaf.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize("order", [range(8), [7, 2, 5, 0, 3, 6, 1, 4]], ids=["plain", "permuted"])
@pytest.mark.parametrize(
    "spec", [(), ("x",), (None, "x"), ("x", "y"), (("x", "y"),), (("y", "x"), None), (None, "y")]
)
def test_boxes_are_those_of_the_addressable_shards(order: Any, spec: tuple[Any, ...]) -> None:
    mesh = mesh_of(4, 2, order=list(order))
    array = sharded(np.zeros((8, 8), np.float32), mesh, *spec)
    (leaf,) = describe({"x": array}, "save").leaves
    boxes = boxes_by_device(leaf)
    assert boxes == {s.device: box_of(s.index, (8, 8)) for s in array.addressable_shards}
    table = BoxTable(describe({"x": array}, "save"), 1)
    assert table.shards_of(0) == tuple(shard_of("x", *box) for box in sorted(set(boxes.values())))


def test_shards_are_distinct_sorted_and_shared_by_equal_leaves() -> None:
    mesh = mesh_of(2, 4)
    state = {
        "a": sharded(np.zeros((4, 2), np.float32), mesh, "x"),
        "b": sharded(np.zeros((4, 2), np.int8), mesh, "x"),
        "e": sharded(np.zeros((0, 2), np.int8), mesh),
        "n": 1,
        "s": sharded(np.zeros((), np.int8), mesh),
    }
    table = BoxTable(describe(state, "save"), 1)
    assert table.shards_of(0) == (
        shard_of("a", (0, 2), (0, 2)),
        shard_of("a", (2, 4), (0, 2)),
        shard_of("b", (0, 2), (0, 2)),
        shard_of("b", (2, 4), (0, 2)),
        shard_of("e", (0, 0), (0, 2)),
        shard_of("n"),
        shard_of("s"),
    )
    assert table.targets() == {0: table.shards_of(0)}


def test_host_values_and_arrays_of_one_process_are_held_by_all() -> None:
    """In a job of two processes, what only this one's devices hold has a copy in each."""
    local = jax.device_put(np.arange(4), jax.devices()[3])
    table = BoxTable(describe({"host": 1, "local": local}, "save"), 2)
    assert table.shards_of(0) == table.shards_of(1) == (shard_of("host"), shard_of("local", (0, 4)))
    assert [(leaves.item_bytes, leaves.holders) for leaves in table.held_leaves()] == [
        ({"host": 8}, {(): (0, 1)}),
        ({"local": 4}, {((0, 4),): (0, 1)}),
    ]


def test_named_shardings_that_pad_nothing_cover_the_array_once() -> None:
    mesh = mesh_of(8)
    array = jax.device_put(np.arange(16.0), NamedSharding(mesh, P("x")))
    shards = BoxTable(describe([array], "save"), 1).shards_of(0)
    assert [shard.box for shard in shards] == [((2 * i, 2 * i + 2),) for i in range(8)]


class OfAnotherProcess(jax.sharding.Sharding):
    """On one device, of process 1; this is process 0."""

    device_set: Any = (SimpleNamespace(process_index=1),)


def test_leaf_of_another_process_alone_is_an_error() -> None:
    """That process takes it for its own copy of what all have."""
    leaf = SimpleNamespace(shape=(4,), dtype=np.dtype("float32"), sharding=OfAnotherProcess())
    with pytest.raises(InvalidState, match="'w': it is on devices of process 1 alone"):
        describe({"w": leaf}, "save")


def test_sets_of_shards_are_those_that_the_same_processes_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two slices of two processes: "a" is cut inside a slice, "b" and the number are not."""
    mesh, real = mesh_of(2, 4), tree_module.boxes_by_device

    def on_four_processes(leaf: Leaf) -> dict[Any, Box]:
        boxes = real(leaf)
        return {_Device(d.id, d.id // 2): box for d, box in boxes.items()}

    monkeypatch.setattr(tree_module, "boxes_by_device", on_four_processes)
    state = {
        "a": sharded(np.zeros((8, 2), np.float32), mesh, "y"),
        "b": sharded(np.zeros((4, 2), np.int8), mesh),
        "n": 1,
    }
    table = BoxTable(describe(state, "save"), 4)
    groups = {
        process: {shard.leaf: table.group_of(shard) for shard in table.shards_of(process)}
        for process in range(4)
    }
    assert groups[0] == groups[2]
    assert groups[1] == groups[3]
    assert groups[0]["a"] != groups[1]["a"]
    assert groups[0]["b"] == groups[0]["n"] == groups[1]["b"]
    assert groups[0]["b"] not in (groups[0]["a"], groups[1]["a"])
    assert table.group_of(shard_of("a", (0, 1), (0, 2))) is None
    assert table.group_of(shard_of("z")) is None
    needs = [table.needs_of(process) for process in range(4)]
    assert needs[0] == needs[2]
    assert len({*needs[0]} & {*needs[1]}) == 1  # the name of "b" and "n" together
    assert len(needs[0]) == 2
