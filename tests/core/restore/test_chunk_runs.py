"""Chunks laid one after the other are the bytes of their box, or they are not said to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.restore.storage_read import StoredArray, runs_of
from emergency_ckpt.types import Box


def stored_chunk(values: np.ndarray, chunks: tuple[int, ...], at: tuple[int, ...]) -> bytes:
    """A chunk as zarr stores it: always whole, filled up where the array ends."""
    padded = np.full([-(-s // c) * c for s, c in zip(values.shape, chunks, strict=True)], 255)
    padded[tuple(slice(0, size) for size in values.shape)] = values
    part = padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
    return part.astype(np.uint8).tobytes()


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@st.composite
def boxes_of_arrays(draw: st.DrawFn) -> tuple[StoredArray, Box]:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, size)) for size in shape)
    spans = [sorted(draw(st.permutations(range(size + 1)))[:2]) for size in shape]
    return StoredArray("w", shape, chunks, 1, plain=True), tuple((a, b) for a, b in spans)


@given(boxes_of_arrays())
def test_runs_are_the_bytes_of_the_box(case: tuple[StoredArray, Box]) -> None:
    array, box = case
    values = np.arange(int(np.prod(array.shape)), dtype=np.uint8).reshape(array.shape)
    runs = runs_of(box, array)
    if runs is None:
        return
    found = b"".join(
        stored_chunk(values, array.chunk_shape, run.chunk)[: run.nbytes] for run in runs
    )
    assert found == values[index(box)].tobytes()


@pytest.mark.parametrize(
    ("shape", "chunks", "box"),
    [
        ((8, 6), (4, 6), ((0, 8), (0, 6))),
        ((8, 6), (4, 3), ((4, 8), (3, 6))),
        ((7, 6), (4, 6), ((4, 7), (0, 6))),
        ((2, 8, 3), (1, 4, 3), ((0, 2), (0, 8), (0, 3))),
        ((), (), ()),
    ],
)
def test_usual_chunks_have_runs(shape: tuple[int, ...], chunks: tuple[int, ...], box: Box) -> None:
    assert runs_of(box, StoredArray("w", shape, chunks, 4)) is not None


@pytest.mark.parametrize(
    ("shape", "chunks", "box"),
    [
        ((8, 6), (4, 3), ((0, 4), (0, 6))),  # rows of two chunks alternate
        ((8, 6), (4, 6), ((2, 8), (0, 6))),  # a part of a chunk
        ((8, 5), (8, 3), ((0, 8), (3, 5))),  # a chunk that is cut off in each row
        ((1 << 20,), (1,), ((0, 1 << 20),)),  # too many
    ],
)
def test_other_chunks_have_none(shape: tuple[int, ...], chunks: tuple[int, ...], box: Box) -> None:
    assert runs_of(box, StoredArray("w", shape, chunks, 4)) is None
