"""The data pipeline: same seed, same batches; a restored position gives the next batch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.demo.data import (
    BatchIterator,
    Bytes,
    make_iterator,
)

CORPUS = np.arange(20 * 8 + 1, dtype=np.uint32).astype(np.uint8)  # 20 windows of 8


def iterator(
    process_index: int = 0, process_count: int = 2, seed: int = 0, batch_size: int = 3
) -> BatchIterator:
    return make_iterator(
        CORPUS,
        sequence_length=8,
        batch_size=batch_size,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )


def batches(source: BatchIterator, count: int) -> Bytes:
    return np.stack([next(source) for _ in range(count)])


def test_same_seed_same_batches_other_seed_other_batches() -> None:
    first = batches(iterator(), 10)
    assert first.shape == (10, 3, 9)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, batches(iterator(), 10))
    assert (first != batches(iterator(seed=1), 10)).any()


@pytest.mark.parametrize("position", [0, 1, 4, 25])
def test_restored_position_gives_the_next_batch(position: int) -> None:
    undisturbed = iterator()
    batches(undisturbed, position) if position else None
    saved = json.loads(json.dumps(undisturbed.get_state()))  # as a checkpoint keeps it
    expected = batches(undisturbed, 5)
    fresh = iterator()
    fresh.set_state(saved)
    np.testing.assert_array_equal(batches(fresh, 5), expected)
    used = iterator()
    batches(used, 7)
    used.set_state(saved)
    np.testing.assert_array_equal(batches(used, 5), expected)


def test_processes_share_each_pass_without_overlap() -> None:
    seen = [batches(iterator(process, 2, batch_size=5), 2)[:, :, 0] for process in (0, 1)]
    firsts = sorted(np.concatenate([part.ravel() for part in seen]).tolist())
    assert firsts == [8 * window for window in range(20)]


def test_text_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="20 windows give 10 to each of 2 processes"):
        iterator(batch_size=11)
