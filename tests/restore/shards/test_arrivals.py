"""The queue of restored shards: it ends, by its end or by its deadline."""

from __future__ import annotations

import time

import pytest

from emergency_ckpt.errors import DeadlineExceeded
from emergency_ckpt.restore.shards import Arrivals
from emergency_ckpt.types import ShardId
from emergency_ckpt.work_progress import WorkProgress

SHARD = ShardId("w", ((0, 1),))


def test_arrivals_without_an_end_raise_at_the_deadline() -> None:
    arrivals = Arrivals(WorkProgress.until(time.monotonic()))
    arrivals.put(SHARD)
    found = iter(arrivals)
    assert next(found) == [SHARD]
    with pytest.raises(DeadlineExceeded):
        next(found)


def test_arrivals_end_after_the_last_shard() -> None:
    arrivals = Arrivals(WorkProgress.until(time.monotonic() + 60))
    arrivals.put(SHARD)
    arrivals.end()
    assert list(arrivals) == [[SHARD]]
