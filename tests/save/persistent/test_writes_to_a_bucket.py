"""How many requests a step takes, and what faults of a bucket make of its data and manifests."""

from __future__ import annotations

from typing import Any

import pytest
from bucket_writes import FAULTS, LARGE_FILES
from persistent_steps import DATA_FILE_BYTES
from programs import printed_beside_bucket

pytestmark = pytest.mark.timeout(600)

MOST_REQUESTS = 11  # for the tensors of a step, whatever its size
MOST_OF_A_SAVE = 32  # with all that a save does around them
PASSING = {name for name in FAULTS if not name.startswith("precondition")}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return printed_beside_bucket("bucket_writes.py")


def test_requests_of_a_step_are_few_and_grow_with_its_bytes(seen: dict[str, Any]) -> None:
    """1 GiB takes 48, as docs/ram_and_storage.md says: a save's, and one for each 64 MiB."""
    assert seen["whole"] <= MOST_OF_A_SAVE
    assert seen["small"]["count"] <= MOST_REQUESTS
    large = seen["large"]
    assert large["count"] <= MOST_REQUESTS + LARGE_FILES
    assert sum(each >= DATA_FILE_BYTES for each in large["data"]) == LARGE_FILES


def test_many_leaves_take_no_more_requests_than_few(seen: dict[str, Any]) -> None:
    assert seen["many"]["count"] <= MOST_REQUESTS
    few, many = (seen[step]["operations"]["objects.insert"] for step in ("small", "many"))
    assert many <= few


def test_step_in_a_bucket_equals_that_of_orbax(seen: dict[str, Any]) -> None:
    assert seen["beside"]["ours"] == seen["beside"]["orbax"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_write_loses_nothing(seen: dict[str, Any], fault: str) -> None:
    """The step is whole, or the save says that it failed and the step does not count."""
    found = seen["faults"][fault]
    assert found["hits"]
    assert found["whole"] == (not found["error"])
    assert found.get("whole then", True)
    if fault in PASSING:
        assert not found["error"]
