"""The decision whether new pages of a ramdisk fit below the limits on memory."""

from __future__ import annotations

import pytest

from emergency_ckpt.ram.host_memory import MemoryLimit, fits_limits, tightest

STEP = MemoryLimit("step", 1000, charged_bytes=300)
JOB = MemoryLimit("job", 1000, charged_bytes=750, reclaimable_bytes=50)


def test_limits_none_everything_fits() -> None:
    assert tightest([]) is None
    assert fits_limits(1 << 60, []) == (True, "")


@pytest.mark.parametrize(("new_bytes", "fits"), [(0, True), (300, True), (301, False)])
def test_limits_tightest_decides(new_bytes: int, fits: bool) -> None:
    """Pages of a step that has ended count in the job only."""
    assert tightest([STEP, JOB]) is JOB
    found, reason = fits_limits(new_bytes, [STEP, JOB])
    assert found is fits
    assert bool(reason) is not fits


def test_limits_reason_has_the_figures() -> None:
    _, reason = fits_limits(400, [STEP, JOB])
    assert reason == (
        "the memory limit of job is 1000 bytes, of which 700 are taken: 300 are left for 400 bytes"
        " of new pages"
    )


def test_limit_that_is_exceeded_leaves_nothing() -> None:
    over = MemoryLimit("job", 100, charged_bytes=150)
    assert over.left_bytes == 0
    assert fits_limits(0, [over])[0]
    assert not fits_limits(1, [over])[0]
