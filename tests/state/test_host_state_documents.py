"""Host state documents that were damaged or made up: never taken for what was saved."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN

from emergency_ckpt.core.limits import MAX_DEPTH, MAX_HOST_STATE_CONTAINERS
from emergency_ckpt.errors import CorruptData, HostStateError, HostStateTooLarge
from emergency_ckpt.state import host_state
from emergency_ckpt.state import host_state_codec as codec
from emergency_ckpt.types import OrbaxStep, SaveId

SAVE = SaveId(7, "0198f2c4a1b0-5e9d", "run")
DOCUMENT = (GOLDEN / "process_00003_of_00008_v1.json").read_bytes()
TAGS = ["__bytes__", "__tuple__", "__float__", "__int__", "__dict__", "__array__", "__state__"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(TAGS)


@settings(max_examples=300)
@given(st.integers(0, len(DOCUMENT) * 8 - 1))
def test_one_flipped_bit_never_changes_the_payload(bit: int) -> None:
    data = bytearray(DOCUMENT)
    data[bit // 8] ^= 1 << bit % 8
    try:
        found = host_state.decode(bytes(data))
    except CorruptData:
        return
    # What the digest does not cover is the identity, and that is in the names around it.
    good = host_state.decode(DOCUMENT)
    assert found.payload == good.payload
    assert (found.save, found.owner, found.count) != (good.save, good.owner, good.count)


@pytest.mark.parametrize("length", range(0, len(DOCUMENT), 23))
def test_truncated_document_is_found(length: int) -> None:
    with pytest.raises(CorruptData):
        host_state.decode(DOCUMENT[:length])


def sealed(payload: bytes, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "schema_version": 1,
        "save": {"run_id": "r", "incarnation": "i", "step": 1},
        "owner": 0,
        "count": 1,
        "digest": hashlib.sha256(payload).hexdigest(),
        "payload": msgspec.Raw(payload),
    }
    return msgspec.json.encode({**fields, **changes})


HOSTILE_PAYLOADS = [
    b"[" * 5000 + b"]" * 5000,
    b"[" * 70 + b"]" * 70,
    b'{"__unknown__":1}',
    b'{"__bytes__":1}',
    b'{"__bytes__":"?"}',
    b'{"__bytes__":"AA="}',
    '{"__bytes__":"é"}'.encode(),
    b'{"__tuple__":{}}',
    b'{"__float__":1.5}',
    b'{"__float__":"7ff"}',
    b'{"__float__":"zzzzzzzzzzzzzzzz"}',
    b'{"__int__":5}',
    b'{"__int__":"12z"}',
    b'{"__dict__":[1]}',
    b'{"__dict__":[[1]]}',
    b'{"__dict__":[[[],1]]}',
    b'{"__dict__":{"a":1}}',
    b'{"__array__":[]}',
    b'{"__array__":{"scalar":false,"dtype":"O","shape":[1],"data":"AAAAAAAAAAA="}}',
    b'{"__array__":{"scalar":false,"dtype":"<u2,<u2","shape":[1],"data":"AAAAAA=="}}',
    b'{"__array__":{"scalar":false,"dtype":"<u2","shape":[2],"data":"AA=="}}',
    b'{"__array__":{"scalar":false,"dtype":"<u2","shape":[-1],"data":"AAA="}}',
    b'{"__array__":{"scalar":false,"dtype":"<u2","shape":[0,9223372036854775807],"data":""}}',
    b'{"__array__":{"scalar":false,"dtype":"<u2","shape":[true],"data":"AAA="}}',
    b'{"__array__":{"scalar":false,"dtype":["<u2"],"shape":[1],"data":"AAA="}}',
    b'{"__array__":{"scalar":false,"dtype":"|u1","shape":' + b"[1]" + b',"data":["A"]}}',
    b"NaN",
    b"1e999",
    b'"\\ud800"',
]


@pytest.mark.parametrize("payload", HOSTILE_PAYLOADS, ids=range(len(HOSTILE_PAYLOADS)))
def test_well_sealed_hostile_payload_is_corrupt(payload: bytes) -> None:
    with pytest.raises(CorruptData):
        host_state.decode(sealed(payload))


def one_hash(kind: str, count: int) -> list[Any]:
    """Different keys of a dict that have the same hash."""
    modulus = sys.hash_info.modulus
    if kind == "integers":
        return [number * modulus for number in range(count)]
    if kind == "tuples":
        return [(number * modulus, "a") for number in range(count)]
    multiplier = sys.hash_info.imag
    return [np.complex128(complex(-multiplier * n, n)) for n in range(2, count + 2)]


KINDS = ["integers", "tuples", "complex"]


@pytest.mark.parametrize("kind", KINDS)
def test_dict_of_many_keys_with_one_hash_is_corrupt(kind: str) -> None:
    """Before it is built: its time grows with the square, and 20 MiB would take 17 minutes."""
    keys = one_hash(kind, 3000)
    assert len(set(map(hash, keys))) == 1
    payload = {"__dict__": [[codec.to_payload(key), 1] for key in keys]}
    with pytest.raises(CorruptData, match="the same hash"):
        host_state.decode(sealed(msgspec.json.encode(payload)))


@pytest.mark.parametrize("kind", KINDS)
def test_dict_that_no_reader_takes_is_not_saved(kind: str) -> None:
    few = dict.fromkeys(one_hash(kind, 64), 1)
    assert codec.from_payload(codec.to_payload(few)) == few
    with pytest.raises(HostStateError, match="the same hash"):
        codec.to_payload({"deep": [dict.fromkeys(one_hash(kind, 65), 1)]})


def test_key_of_many_digits_comes_back() -> None:
    state = {10**5000: "a", (1, 10**5000): "b"}
    assert codec.from_payload(codec.to_payload(state)) == state


HOSTILE_FIELDS: list[dict[str, object]] = [
    {"schema_version": 2},
    {"schema_version": "1"},
    {"owner": 1},
    {"owner": -1},
    {"count": 10**7},
    {"count": 1 << 80},
    {"extra": 1},
    {"save": {"run_id": "../x", "incarnation": "i", "step": 1}},
    {"save": {"run_id": "r", "incarnation": "a/b", "step": 1}},
    {"save": {"run_id": "r", "incarnation": "i", "step": -1}},
    {"digest": "0" * 64},
    {"save": None},
]


@pytest.mark.parametrize("changes", HOSTILE_FIELDS, ids=str)
def test_hostile_fields_are_corrupt(changes: dict[str, object]) -> None:
    host_state.decode(sealed(b"null"))
    with pytest.raises(CorruptData):
        host_state.decode(sealed(b"null", **changes))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TAGS) | texts, inner)
    ),
    max_leaves=8,
)


@pytest.mark.dear
@settings(max_examples=300)
@given(json_values.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=60))
def test_any_payload_decodes_or_is_corrupt(payload: bytes) -> None:
    try:
        document = host_state.decode(sealed(payload))
    except CorruptData:
        return
    host_state.value_of(document.payload)


@given(st.binary(max_size=100))
def test_any_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptData):
        host_state.decode(data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"schema_version":' * 10_000, b"", b"null"])
def test_hostile_documents(data: bytes) -> None:
    with pytest.raises(CorruptData):
        host_state.decode(data)


def test_document_of_too_many_lists_is_refused_both_ways() -> None:
    most = MAX_HOST_STATE_CONTAINERS
    with pytest.raises(HostStateTooLarge, match=f"more than {most} lists and dicts"):
        host_state.encode(SAVE, 0, 1, [[]] * most)
    payload = b"[" + b"[]," * most + b"0]"
    with pytest.raises(CorruptData, match=f"more than {most} lists and dicts"):
        host_state.decode(sealed(payload))


@pytest.mark.parametrize("text", ["[", "{", '"[', "\\[", '\\"{', "\\\\"])
def test_brackets_in_texts_are_no_lists(text: str) -> None:
    payload = [text * MAX_HOST_STATE_CONTAINERS, [1.5]]
    assert host_state.decode(host_state.encode(SAVE, 0, 1, payload)).payload == payload


def test_numbers_nested_too_deep_are_refused() -> None:
    payload: list[object] = [1, 2]
    for _ in range(MAX_DEPTH - 1):
        payload = [payload]
    assert codec.from_payload(payload) == payload
    with pytest.raises(CorruptData, match="nested deeper"):
        codec.from_payload([payload])


ORBAX = OrbaxStep(
    items=("params",),
    metrics={"loss": 0.5},
    custom_metadata={"a": [1]},
    step_name="ckpt_00",
)


def test_document_of_the_first_process_has_what_orbax_finds() -> None:
    assert host_state.decode(host_state.encode(SAVE, 0, 2, 1, orbax=ORBAX)).orbax == ORBAX
    assert host_state.encode(SAVE, 1, 2, 1, orbax=ORBAX) == host_state.encode(SAVE, 1, 2, 1)
    plain = host_state.encode(SAVE, 0, 2, 1, orbax=OrbaxStep())
    assert "orbax" not in json.loads(plain)


def test_document_whose_metrics_were_changed_is_refused() -> None:
    data = host_state.encode(SAVE, 0, 2, 1, orbax=ORBAX)
    with pytest.raises(CorruptData, match="digest differs"):
        host_state.decode(data.replace(b"0.5", b"0.6"))


@pytest.mark.parametrize(
    "orbax",
    [
        {"step_name": "../x_0"},
        {"items": ["../x"]},
        {"items": 3},
        {"metrics": {}, "custom_metadata": 3},
        [],
    ],
)
def test_document_with_names_of_no_folder_is_refused(orbax: object) -> None:
    fields = json.loads(host_state.encode(SAVE, 0, 1, 1))
    text = msgspec.json.encode(orbax)
    fields["digest"] = hashlib.sha256(b"1" + text).hexdigest()
    with pytest.raises(CorruptData):
        host_state.decode(msgspec.json.encode({**fields, "orbax": msgspec.Raw(text)}))
