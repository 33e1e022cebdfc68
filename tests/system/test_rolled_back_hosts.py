"""A job goes back to step 5; hosts that were away return with a whole step 10 of before.

Four real processes, two slices of two hosts; each program is judged by a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, of, run_life, spec_of

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "rolled_back_job.py"), root)


@pytest.mark.parametrize(
    ("program", "step", "tier"),
    [
        ("same_step", 10, "local"),
        ("newer_step_abandoned", 8, "local"),
        ("only_storage_has_the_new", 10, "persistent"),
    ],
)
def test_returned_hosts_bring_nothing_back(
    results: list[dict[str, Any]], program: str, step: int, tier: str
) -> None:
    """Bit for bit, tensors and iterators; nor does the restart after that."""
    for since, first, second in of(results, program):
        assert since == 5
        for seen in (first, second):
            assert (seen["step"], seen["from_new"], seen["iterator_new"]) == (step, True, True)
        assert (first["tier"], second["tier"]) == (tier, "local")


def test_abandoned_newer_step_is_named_as_rolled_back(results: list[dict[str, Any]]) -> None:
    for _, first, _ in of(results, "newer_step_abandoned"):
        reasons = [reason for step, reason in first["rejected"] if step == 10]
        assert any("rolled back" in reason for reason in reasons), first["rejected"]
