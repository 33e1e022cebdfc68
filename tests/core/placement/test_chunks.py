"""The chunks in which an array is stored."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.boxes import chunk_shape

CASES = {
    "a scalar": ((), 4, 64, ()),
    "small enough": ((4, 4), 4, 64, (4, 4)),
    "along the first axis": ((16, 4), 4, 64, (4, 4)),
    "by a divisor": ((6, 4), 4, 64, (3, 4)),
    "along the second axis too": ((3, 64), 4, 64, (1, 16)),
    "one long axis": ((1 << 20,), 1, 1 << 18, (1 << 18,)),
    "no divisor": ((1009, 4), 4, 1024, (1009, 4)),
    "one element above the limit": ((2, 2), 8, 4, (1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_chunk_shape_of_a_part(case: str) -> None:
    part, item_bytes, limit_bytes, expected = CASES[case]
    assert chunk_shape(part, item_bytes, limit_bytes) == expected


@given(
    st.lists(st.integers(1, 300), max_size=4).map(tuple),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(8, 4096),
)
def test_chunks_divide_a_part_evenly(
    part: tuple[int, ...], item_bytes: int, limit_bytes: int
) -> None:
    chunk = chunk_shape(part, item_bytes, limit_bytes)
    assert all(size % each == 0 for size, each in zip(part, chunk, strict=True))
    # Its values lie together: only the first axis longer than 1 is divided.
    first = next((axis for axis, each in enumerate(chunk) if each > 1), len(chunk))
    assert chunk[first + 1 :] == part[first + 1 :]
    fewest = -(-prod(part) * item_bytes // limit_bytes)
    assert chunk == part or prod(part) // prod(chunk) <= 8 * fewest
    if prod(part) * item_bytes <= limit_bytes:
        assert chunk == part
