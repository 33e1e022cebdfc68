"""A value of storage that is not the one that was saved is never restored, nor kept in RAM."""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import of

results = results_of("rotten_storage_job.py", hosts=1)


@pytest.mark.parametrize("program", ["same_mesh", "other_mesh"])
def test_older_step_is_taken_now_and_in_the_next_life(results: Results, program: str) -> None:
    for first, second in of(results, program):
        for seen in (first, second):
            assert (seen["step"], seen["differences"]) == (5, [])
            assert seen["iterator_right"]
            # Not whole in RAM either: what was read of it did not pass for it.
            assert {rejected[0] for rejected in seen["rejected"]} == {10}
        assert (first["tier"], second["tier"]) == ("persistent", "local")
