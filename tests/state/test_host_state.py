"""Host states come back exactly, into the objects they came from; nothing hostile gets through."""

from __future__ import annotations

import collections
import math
import struct
from typing import Any

import grain.python as grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers_support import save_id

from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES
from emergency_ckpt.errors import CorruptData, HostStateError, HostStateTooLarge
from emergency_ckpt.state import host_state

TAGS = ["__bytes__", "__tuple__", "__float__", "__int__", "__dict__", "__array__", "__state__"]


class Counter:
    """The smallest iterator with a state. Its state is its own mutable dict."""

    def __init__(self, position: int = 0) -> None:
        self.state = {"position": position, "buffer": [position]}

    def advance(self) -> None:
        self.state["position"] += 1
        self.state["buffer"].append(self.state["position"])

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


class Broken(Counter):
    def set_state(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no such shard file")


def through_a_document(value: object) -> Any:
    data = host_state.encode(save_id(1), 2, 4, host_state.capture(value))
    return host_state.value_of(host_state.decode(data).payload)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(TAGS)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=8)
)
keys = texts | st.integers() | st.binary(max_size=3) | st.tuples(st.integers(), texts)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    """Equal with equal types at every place, dicts in the same order, -0.0 apart from 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return len(left) == len(right) and all(
            same(a, b) for a, b in zip(left.items(), right.items(), strict=True)
        )
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return left == right


@given(values)
def test_round_trip(value: object) -> None:
    assert same(through_a_document(value), value)


@given(st.integers(0, (1 << 64) - 1))
def test_every_float_keeps_its_bits(bits: int) -> None:
    value = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    assert struct.pack(">d", through_a_document([value])[0]) == struct.pack(">d", value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1 << 9999], ids=range(6)
)
def test_numbers_that_json_has_not(value: float) -> None:
    assert same(through_a_document(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([], np.float32).reshape(0, 4),
        np.array(3.5, np.float16),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.arange(4, dtype=">u4"),
        np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
    ],
)
def test_numeric_arrays(array: np.ndarray) -> None:
    found = through_a_document({"a": array})["a"]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    found[...] = 0  # its own memory


def test_numpy_scalars_stay_numpy_scalars() -> None:
    foreign = np.array(2.5, ">f8")[()]
    for scalar in (np.int64(7), np.float64(0.1), np.bool_(True), np.float32(math.inf), foreign):
        found = through_a_document(scalar)
        assert type(found) is type(scalar)
        assert found == scalar


def test_state_of_numpys_generators() -> None:
    old = np.random.RandomState(7)
    new = np.random.Generator(np.random.PCG64(7))
    payload = host_state.capture({"old": old, "new": new.bit_generator.state})
    expected = old.rand(3).tolist(), new.random(3).tolist()
    again = np.random.RandomState(1)
    restored = host_state.apply({"old": again, "new": None}, payload)
    other = np.random.Generator(np.random.PCG64(1))
    other.bit_generator.state = restored["new"]
    assert (again.rand(3).tolist(), other.random(3).tolist()) == expected


def test_grain_iterator_continues_where_it_was() -> None:
    dataset = grain.MapDataset.range(100).shuffle(seed=3).to_iter_dataset()
    iterator = iter(dataset)
    for _ in range(17):
        next(iterator)
    data = host_state.encode(save_id(1), 0, 4, host_state.capture(iterator))
    expected = [next(iterator) for _ in range(5)]
    again = iter(dataset)
    assert host_state.apply(again, host_state.decode(data).payload) is again
    assert [next(again) for _ in range(5)] == expected


def test_later_changes_do_not_show_in_what_was_captured() -> None:
    counter = Counter(3)
    nested = {"it": counter, "list": [1, {"deep": [2]}], "array": np.zeros(2)}
    payload = host_state.capture(nested)
    counter.advance()
    nested["list"][1]["deep"].append(99)
    nested["array"][:] = 7
    found = host_state.value_of(payload)
    assert found["it"] == {"position": 3, "buffer": [3]}
    assert found["list"] == [1, {"deep": [2]}]
    assert found["array"].tolist() == [0, 0]


def test_apply_repositions_in_place_and_gives_nothing_away() -> None:
    counter = Counter(3)
    payload = host_state.capture(counter)
    other = Counter(50)
    assert host_state.apply(other, payload) is other
    other.advance()
    third = Counter()
    host_state.apply(third, payload)
    assert third.state == {"position": 3, "buffer": [3]}


def test_apply_in_structures() -> None:
    saved = {"train": Counter(3), "evals": [Counter(4), (Counter(5), "x")], "epoch": 2}
    payload = host_state.capture(saved)
    train, first, second = Counter(), Counter(), Counter()
    evals = [first, (second, "y")]
    target = {"train": train, "evals": evals, "epoch": 0}
    restored = host_state.apply(target, payload)
    assert restored is target
    assert target["evals"] is evals
    assert [c.state["position"] for c in (train, first, second)] == [3, 4, 5]
    assert target["epoch"] == 2
    assert evals[1] == (second, "x")


def test_plain_values_are_replaced() -> None:
    assert host_state.apply(None, host_state.capture(7)) == 7
    assert host_state.apply(5, host_state.capture(None)) is None
    target = {"gone": 1}
    assert host_state.apply(target, host_state.capture({"new": [1]})) is target
    assert target == {"new": [1]}
    items = [1, 2, 3]
    assert host_state.apply(items, host_state.capture([4])) is items
    assert items == [4]


MISMATCHES = {
    "object to plain": (Counter(1), 5),
    "plain to object": (5, Counter(1)),
    "other keys": ({"a": Counter(1)}, {"b": Counter(1)}),
    "key more": ({"a": Counter(1)}, {"a": Counter(1), "b": 1}),
    "shorter": ([Counter(1), Counter(2)], [Counter(1)]),
    "tuple to list": ((Counter(1),), [Counter(1)]),
    "object lost in plain": ({"a": [Counter(1)]}, {"a": [1]}),
    "dict to list": ({"a": Counter(1)}, [Counter(1)]),
}


@pytest.mark.parametrize(("saved", "target"), MISMATCHES.values(), ids=MISMATCHES)
def test_another_structure_is_an_error_and_moves_nothing(saved: object, target: object) -> None:
    payload = host_state.capture(saved)
    before = host_state.capture(target)
    with pytest.raises(HostStateError, match="restore host_state"):
        host_state.apply(target, payload)
    assert host_state.capture(target) == before


def test_failing_set_state_is_named() -> None:
    payload = host_state.capture({"it": Counter(1)})
    with pytest.raises(HostStateError, match="no such shard file"):
        host_state.apply({"it": Broken()}, payload)


class Failing(Counter):
    def get_state(self) -> dict[str, Any]:
        raise RuntimeError("worker died")


NOT_STORABLE = {
    "set": {1, 2},
    "object": object(),
    "class": Counter,
    "ordered dict": collections.OrderedDict(a=1),
    "object array": np.array([object()]),
    "text array": np.array(["a"]),
    "numpy text": np.str_("a"),
    "masked array": np.ma.masked_array([1, 2], mask=[True, False]),
    "long double": np.longdouble(1),
    "failing iterator": Failing(),
    "enum-like": type("Number", (int,), {})(1),
}


@pytest.mark.parametrize("value", NOT_STORABLE.values(), ids=NOT_STORABLE)
def test_what_cannot_be_stored_is_named_with_its_place(value: object) -> None:
    with pytest.raises(HostStateError, match=r"host_state\['x'\]\[1\]"):
        host_state.capture({"x": [0, value]})


def test_structure_that_holds_itself_is_an_error() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(HostStateError, match="nested deeper"):
        host_state.capture(loop)


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, {("\ud800",): 1}], ids=ascii)
def test_capture_of_text_that_is_not_unicode_is_an_error(value: object) -> None:
    with pytest.raises(HostStateError, match=r"host_state\['x'\].*not valid Unicode"):
        host_state.capture({"x": value})


def test_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptData, match="too long"):
        host_state.decode(bytes(MAX_HOST_STATE_BYTES + 1))
    payload = host_state.capture(b"x" * 3000)
    size = len(host_state.encode(save_id(1), 0, 1, payload))
    monkeypatch.setattr("emergency_ckpt.state.host_state.MAX_HOST_STATE_BYTES", size)
    host_state.encode(save_id(1), 0, 1, payload)
    with pytest.raises(HostStateTooLarge, match=f"at most {size} bytes"):
        host_state.encode(save_id(1), 0, 1, host_state.capture(b"x" * 3003))


def test_nothing_is_a_state_too() -> None:
    document = host_state.decode(host_state.encode(save_id(1), 0, 1, host_state.capture(None)))
    assert document.empty
    zero = host_state.decode(host_state.encode(save_id(1), 0, 1, host_state.capture(0)))
    assert not zero.empty
