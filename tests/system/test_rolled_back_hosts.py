"""A job goes back to step 5; hosts that were away return with a whole step 10 of before.

Four real processes, two slices of two hosts; each program is judged by a test.
"""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import of

pytestmark = pytest.mark.timeout(900)


results = results_of("rolled_back_job.py")


@pytest.mark.parametrize(
    ("program", "step", "tier"),
    [
        ("same_step", 10, "local"),
        ("newer_step_abandoned", 8, "local"),
        ("abandoned_out_of_reach", 8, "local"),
        ("only_storage_has_the_new", 10, "persistent"),
    ],
)
def test_returned_hosts_bring_nothing_back(
    results: Results, program: str, step: int, tier: str
) -> None:
    """Bit for bit, tensors and iterators; nor does the restart after that."""
    for since, first, second in of(results, program):
        assert since == 5
        for seen in (first, second):
            assert (seen["step"], seen["from_new"], seen["iterator_new"]) == (step, True, True)
        assert (first["tier"], second["tier"]) == (tier, "local")


def test_abandoned_newer_step_is_named_as_rolled_back(results: Results) -> None:
    for _, first, _ in of(results, "newer_step_abandoned"):
        reasons = [reason for step, reason in first["rejected"] if step == 10]
        assert any("rolled back" in reason for reason in reasons), first["rejected"]
