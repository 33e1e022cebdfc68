"""CRC32C of the native engine: standard vectors, another implementation, splits."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_parts import random_bytes

from emergency_ckpt import _native


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_check_vectors_of_rfc_3720(data: bytes, crc: int) -> None:
    assert _native.crc32c(data) == crc


def test_implementation_is_one_of_the_documented() -> None:
    assert _native.implementation() in {"sse4.2", "armv8", "portable"}


@given(st.binary(max_size=5000), st.integers(0, 2**32 - 1))
def test_equals_google_crc32c(data: bytes, value: int) -> None:
    assert _native.crc32c(data) == google_crc32c.value(data)
    assert _native.crc32c(data, value) == google_crc32c.extend(value, data)


def test_equals_google_crc32c_on_long_data() -> None:
    data = random_bytes(3_000_001)
    assert _native.crc32c(data) == google_crc32c.value(data)


@given(st.binary(max_size=2000), st.data())
def test_combine_joins_parts(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    first, second = _native.crc32c(data[:cut]), _native.crc32c(data[cut:])
    assert _native.crc32c_combine(first, second, len(data) - cut) == _native.crc32c(data)


@pytest.mark.parametrize("data", [np.zeros(10)[::2], memoryview(b"abcdef")[::2]])
def test_data_must_be_contiguous(data: object) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _native.crc32c(data)  # type: ignore[arg-type]


def test_data_must_be_a_buffer() -> None:
    with pytest.raises(TypeError):
        _native.crc32c("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 2**32, 2**70])
def test_crc_values_are_checked(value: int) -> None:
    with pytest.raises(ValueError, match="value must be in"):
        _native.crc32c(b"", value)
    with pytest.raises(ValueError, match="first must be in"):
        _native.crc32c_combine(value, 0, 0)
    with pytest.raises(ValueError, match="second_nbytes must be in"):
        _native.crc32c_combine(0, 0, -1)
