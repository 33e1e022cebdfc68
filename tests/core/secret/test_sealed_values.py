"""Seals of values in a store that anybody can write to."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.keys import OpenedValue, open_value, seal_value

KEY = b"k" * 32
OPENED = OpenedValue(7, 3, b"value")


def test_seal_value_has_the_bytes_of_its_description() -> None:
    signed = b"\0\0\0\x07\0\0\0\x03value"
    tag = hmac.digest(KEY, b"\0\0\0\x04name" + signed, "sha256")[:16]
    assert seal_value(KEY, "name", OPENED) == tag + signed


@given(st.text(max_size=50), st.integers(0, 2**32 - 1), st.binary(max_size=100))
def test_open_value_returns_what_was_sealed(name: str, number: int, value: bytes) -> None:
    opened = OpenedValue(number, 5, value)
    assert open_value(KEY, name, seal_value(KEY, name, opened)) == opened


def test_open_value_refuses_every_changed_bit_and_length() -> None:
    sealed = seal_value(KEY, "name", OPENED)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert open_value(KEY, "name", bytes(changed)) is None
    for length in range(len(sealed)):
        assert open_value(KEY, "name", sealed[:length]) is None
    assert open_value(KEY, "name", sealed + b"\0") is None


@pytest.mark.parametrize(("key", "name"), [(b"l" * 32, "name"), (KEY, "other"), (KEY, "")])
def test_open_value_refuses_another_key_or_name(key: bytes, name: str) -> None:
    assert open_value(key, name, seal_value(KEY, "name", OPENED)) is None
