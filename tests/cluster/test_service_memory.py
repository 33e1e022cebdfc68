"""The process of JAX's coordination service does not grow with the number of saves."""

from __future__ import annotations

import pytest
from places import JOBS
from programs import printed

SHARE = 0.3
"""What votes may leave of what as many barriers leave that have names of their own."""


@pytest.mark.parametrize(
    "votes", [1500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_service_memory_after_many_votes_is_flat(votes: int) -> None:
    told = printed(JOBS / "service_memory_program.py", votes, timeout_s=500)
    before_bytes, after_bytes, named_bytes = map(int, told.split())
    assert after_bytes - before_bytes < SHARE * (named_bytes - after_bytes)
