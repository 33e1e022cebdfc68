"""One life of many saves and restores: what it holds does not grow with their number."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, run_life, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROGRAM_TIMEOUT_S = 3000.0
"""Its 2,000 saves take four minutes on two idle cores."""
SIZES = ("resident_bytes", "allocated_bytes", "objects", "ramdisk_bytes")
COUNTS = ("ramdisk_files", "stored_files", "descriptors", "python_threads", "keys", "arrays")


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        spec = spec_of(root, "long_job.py", hosts=1)
        yield run_life(spec, root, program_timeout_s=PROGRAM_TIMEOUT_S)


@pytest.mark.parametrize("phase", ["saving", "restoring"])
def test_sizes_grow_by_less_than_a_hundredth(results: list[dict[str, Any]], phase: str) -> None:
    for process, result in enumerate(results):
        measured = result["long_life"]["value"][phase]
        quarter = len(measured) // 4
        for name in SIZES:
            # Medians: Python's table of interned strings has twice its 4 MB while it is renewed.
            before, after = (
                statistics.median(each[name] for each in part)
                for part in (measured[quarter : 2 * quarter], measured[-quarter:])
            )
            assert after <= 1.01 * before, (process, name)


@pytest.mark.parametrize("phase", ["saving", "restoring"])
def test_nothing_more_is_left_open(results: list[dict[str, Any]], phase: str) -> None:
    for process, result in enumerate(results):
        first, *later = result["long_life"]["value"][phase]
        for name in COUNTS:
            assert max(each[name] for each in later) <= first[name], (process, name)


def test_threads_stay_few(results: list[dict[str, Any]]) -> None:
    """JAX's and TensorStore's pools start theirs when they need them."""
    for result in results:
        assert max(each["threads"] for each in result["long_life"]["value"]["saving"]) <= 80
