"""Reads from a bucket: few requests, many at once, each byte once; one that stalls is repeated."""

from __future__ import annotations

from typing import Any

import pytest
from programs import printed_beside_bucket

LARGE_CHUNKS = 24
REQUESTS_BESIDES = 16
"""Of a step: the database's manifests and nodes, and 300 small leaves, which lie side by side. A
GiB in chunks of 64 MiB takes so many requests and 16 more."""
REQUESTS_TO_DESCRIBE = 16
AT_ONCE = 8
"""Requests in flight: with 100 ms each, and 64 MiB in each, far more than any network takes."""


def test_reads_are_few_requests_and_many_at_once() -> None:
    found = printed_beside_bucket("bucket_reads_program.py", "plain", timeout_s=250)
    assert found["same"]
    assert found["requests"] <= LARGE_CHUNKS + REQUESTS_BESIDES
    assert found["described"] <= REQUESTS_TO_DESCRIBE
    assert found["at_once"] >= AT_ONCE
    assert found["served"] < 1.05, "each byte once"


@pytest.fixture(scope="module")
def found() -> Any:
    return printed_beside_bucket("bucket_reads_program.py", timeout_s=250)


@pytest.mark.parametrize("case", ["stalled_data", "stalled_node"])
def test_request_that_stalls_is_given_up_and_asked_again(found: Any, case: str) -> None:
    """One request, for a chunk or two, is held until the end."""
    assert found[case] == {"same": True, "hit": 1}


def test_bucket_that_stalls_is_an_error(found: Any) -> None:
    assert found["all_stall"]["error"] == "PersistentTierError"
    assert not found["all_stall"]["same"]
