"""How much device memory copies may take: each clause of the rule alone."""

from __future__ import annotations

import pytest

from emergency_ckpt.core.save.snapshot_plan import Free, free_for_copies, limit_of_copies

GPU = {
    "bytes_limit": 1000,
    "pool_bytes": 1000,
    "bytes_in_use": 500,
    "peak_bytes_in_use": 600,
    "largest_free_block_bytes": 0,
}


@pytest.mark.parametrize(
    ("platform", "changed", "free"),
    [
        ("gpu", {}, 200),
        # The peak counts, and what is in use where that is more.
        ("gpu", {"peak_bytes_in_use": 900}, 50),
        ("gpu", {"bytes_in_use": 800}, 100),
        ("gpu", {"peak_bytes_in_use": 1200}, 0),
        # What was reserved was never free.
        ("gpu", {"peak_bytes_reserved": 100}, 150),
        ("gpu", {"bytes_reserved": 300}, 50),
        # One block must hold the largest copy: the largest block is all that is certain.
        ("gpu", {"largest_free_block_bytes": 100}, 50),
        ("gpu", {"largest_free_block_bytes": 700}, 200),
        # A pool that grows: others may have the memory by then.
        ("gpu", {"pool_bytes": 700}, 0),
        ("gpu", {"pool_bytes": 990}, 195),
        ("tpu", {}, 200),
        ("tpu", {"pool_bytes": 0}, 200),
        ("cpu", {}, 0),
        ("rocket", {}, 0),
    ],
)
def test_half_of_what_is_certain_is_free(platform: str, changed: dict[str, int], free: int) -> None:
    assert free_for_copies(platform, {**GPU, **changed}).nbytes == free


@pytest.mark.parametrize("missing", ["bytes_limit", "peak_bytes_in_use", "pool_bytes"])
def test_without_what_is_needed_nothing_is_free(missing: str) -> None:
    stats = {name: value for name, value in GPU.items() if name != missing}
    free = free_for_copies("gpu", stats)
    assert free.nbytes == 0
    assert free.reason


def test_what_a_tpu_reserves_is_not_free() -> None:
    """As measured: 28.6 GiB by the limit and the peak alone, where 1.35 were free."""
    gib = 1 << 30
    stats = {
        "bytes_limit": 31 * gib,
        "peak_bytes_in_use": 2 * gib,
        "peak_bytes_reserved": 27 * gib,
        "largest_free_block_bytes": gib,
    }
    assert free_for_copies("tpu", stats).nbytes == gib // 2


@pytest.mark.parametrize(
    ("unused", "limit"),
    [
        # 40 were unused before any copy: copies of 15, or of all 20, are in the peak from then on.
        (25, 20),
        (20, 20),
        # Training needs more than before.
        (19, 9),
        (10, 5),
        (0, 0),
        (80, 20),  # never raised
    ],
)
def test_own_copies_in_the_peak_do_not_lower_the_limit(unused: int, limit: int) -> None:
    first = limit_of_copies(None, Free(40, "at the first look"))
    assert first.nbytes == 20
    later = limit_of_copies(first, Free(unused, "later"))
    assert later == (first if limit == 20 else Free(unused, "later"))
    assert later.nbytes == limit
