"""Bulk copy with CRC32C, CRC of ranges and prefault of the native engine."""

from __future__ import annotations

import os
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import SIZE_BYTES, contents, make_mapping, random_bytes

from emergency_ckpt import _native
from emergency_ckpt.state.dtypes import non_finite_pattern


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 100)), max_size=20),
    st.integers(1, 4),
    st.integers(0, 70),
)
def test_copies_are_exact_and_touch_nothing_else(
    layout: list[tuple[int, int]], threads: int, misalign: int
) -> None:
    mapping = make_mapping(1 << 17)
    pool = random_bytes(4000)
    expected = bytearray(1 << 17)
    copies: list[tuple[bytes, int]] = []
    offset = misalign
    for nbytes, gap in layout:
        data = pool[gap : gap + nbytes]
        copies.append((data, offset))
        expected[offset : offset + nbytes] = data
        offset += nbytes + gap
    crcs = [google_crc32c.value(data) for data, _ in copies]
    assert _native.copy_crc32c(mapping, copies, threads) == crcs
    assert contents(mapping, 0, 1 << 17) == expected
    ranges = [(offset, len(data)) for data, offset in copies]
    assert _native.crc32c_ranges(mapping, ranges, threads) == crcs


@settings(deadline=None)
@given(
    st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]),
    st.lists(st.integers(0, 40_000), max_size=6),
    st.integers(0, 9),
    st.integers(1, 3),
)
def test_copies_count_values_that_are_not_finite(
    dtype: type, lengths: list[int], misalign: int, threads: int
) -> None:
    mapping = make_mapping(1 << 22)
    pattern = non_finite_pattern(np.dtype(dtype).name)
    random = np.random.default_rng(len(lengths))
    arrays = [random.standard_normal(length).astype(dtype) for length in lengths]
    for array in arrays[1:]:  # the first is finite
        array[random.random(array.size) < 0.01] = random.choice([np.nan, np.inf, -np.inf])
    offsets = np.cumsum([misalign, *(array.nbytes + 3 for array in arrays)]).tolist()
    copies = [(a.view(np.uint8), at) for a, at in zip(arrays, offsets, strict=False)]
    crcs, counts = _native.copy_and_count(mapping, copies, [pattern] * len(copies), threads)
    assert crcs == [google_crc32c.value(array.tobytes()) for array in arrays]
    assert counts == [int((~np.isfinite(array)).sum()) for array in arrays]
    for array, at in zip(arrays, offsets, strict=False):
        assert contents(mapping, at, array.nbytes) == array.tobytes()


@pytest.mark.parametrize(
    "patterns", [[], [(4, 1, 1)] * 2, [(3, 1, 1)], [(4, 1)], [(4, -1, 1)], [(4, 1 << 64, 1)]]
)
def test_other_patterns_are_refused(mapping: _native.Mapping, patterns: list[Any]) -> None:
    before = contents(mapping, 0, 100)
    with pytest.raises(ValueError, match=r"pattern|width|mask"):
        _native.copy_and_count(mapping, [(b"x" * 100, 0)], patterns, 1)
    assert contents(mapping, 0, 100) == before


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("misalign", [0, 1, 63])
def test_one_buffer_split_over_threads(threads: int, misalign: int) -> None:
    nbytes = (5 << 20) + 12345
    mapping = make_mapping(nbytes + 64)
    data = random_bytes(nbytes + misalign)[misalign:]
    crc = google_crc32c.value(data)
    assert _native.copy_crc32c(mapping, [(data, misalign)], threads) == [crc]
    assert contents(mapping, misalign, nbytes) == data
    assert _native.crc32c_ranges(mapping, [(misalign, nbytes)], threads) == [crc]


def test_thousands_of_small_buffers(mapping: _native.Mapping) -> None:
    values = np.arange(5000, dtype=np.int64)
    copies = [(values[i : i + 1], 64 * i) for i in range(len(values))]
    crcs = _native.copy_crc32c(mapping, copies, 2)
    assert crcs == [google_crc32c.value(value.tobytes()) for value in values]
    stored = mapping.view(0, 64 * len(values), None).reshape(-1, 64)[:, :8]
    np.testing.assert_array_equal(np.ascontiguousarray(stored).view(np.int64)[:, 0], values)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.array(3.5),
        np.zeros((0, 5), np.int16),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.arange(5).astype(ml_dtypes.float8_e4m3fn),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_of_any_dtype_and_read_only_ones(
    mapping: _native.Mapping, array: np.ndarray
) -> None:
    array.flags.writeable = False
    assert _native.copy_crc32c(mapping, [(array, 3)], 1) == [google_crc32c.value(array.tobytes())]
    assert contents(mapping, 3, array.nbytes) == array.tobytes()


def test_copy_that_is_refused_writes_nothing(mapping: _native.Mapping) -> None:
    bad_copies = [
        (b"x", SIZE_BYTES),
        (b"x", -1),
        (b"xy", SIZE_BYTES - 1),
        (np.zeros((4, 4)).T[1:], 0),
    ]
    for bad in bad_copies:
        with pytest.raises(ValueError, match=r"outside|must be in|contiguous"):
            _native.copy_crc32c(mapping, [(b"good", 0), bad], 1)
    with pytest.raises(ValueError, match="pairs"):
        _native.copy_crc32c(mapping, [(b"good", 0), (b"x",)], 1)  # type: ignore[list-item]
    assert contents(mapping, 0, 4) == bytes(4)


def test_buffers_are_let_go_after_the_call(mapping: _native.Mapping) -> None:
    data = bytearray(b"abc")
    _native.copy_crc32c(mapping, [(data, 0)], 1)
    with pytest.raises(ValueError, match="outside"):
        _native.copy_crc32c(mapping, [(data, 0), (data, SIZE_BYTES)], 1)
    data.append(1)  # BufferError, were it still exported


@pytest.mark.parametrize("threads", [0, -1, 257, 2**40])
def test_number_of_threads_is_bounded(mapping: _native.Mapping, threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be in"):
        _native.copy_crc32c(mapping, [(b"a", 0)], threads)
    with pytest.raises(ValueError, match="threads must be in"):
        _native.crc32c_ranges(mapping, [(0, 1)], threads)
    with pytest.raises(ValueError, match="threads must be in"):
        _native.prefault(mapping, 0, 1, threads)


@pytest.mark.parametrize("written", [False, True])
def test_prefault_makes_pages_present_and_changes_nothing(*, written: bool) -> None:
    fd = os.memfd_create("eckpt_test")
    try:
        os.ftruncate(fd, SIZE_BYTES)
        mapping = _native.Mapping(fd, SIZE_BYTES, writable=True)
        _native.copy_crc32c(mapping, [(b"kept", 12_345)], 1)
        _native.prefault(mapping, 10, SIZE_BYTES - 20, 2, written=written)
        assert os.fstat(fd).st_blocks * 512 == SIZE_BYTES
        assert contents(mapping, 12_345, 4) == b"kept"
    finally:
        os.close(fd)
