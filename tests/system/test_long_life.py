"""One life of many saves and restores: what it holds does not grow with their number."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, run_life, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GROWTH = {"allocated_bytes": 1.01, "objects": 1.01, "ramdisk_bytes": 1.01, "resident_bytes": 1.06}
"""Python renews its table of interned strings, 4 MB, now and then and in any thread, and ``malloc``
keeps room for it in that thread's arena: resident memory grows by 4 MB for each of 16 arenas."""
COUNTS = ("ramdisk_files", "stored_files", "descriptors", "python_threads", "keys", "arrays")


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "long_job.py", hosts=1), root)


@pytest.mark.parametrize("phase", ["saving", "restoring"])
def test_sizes_grow_by_little(results: list[dict[str, Any]], phase: str) -> None:
    for process, result in enumerate(results):
        measured = result["long_life"]["value"][phase]
        quarter = len(measured) // 4
        for name, most in GROWTH.items():
            before, after = (
                statistics.median(each[name] for each in part)
                for part in (measured[quarter : 2 * quarter], measured[-quarter:])
            )
            assert after <= most * before, (process, name)


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
