"""What two real processes say of values that are not finite, and of lives that end."""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import of

pytestmark = pytest.mark.timeout(600)

results = results_of("watched_steps_job.py", slices=1, hosts=2)


def test_process_tells_of_its_own_part(results: Results) -> None:
    first, second = of(results, "one_part_is_not_finite")
    assert first == [[], []]
    assert second == [[2], [2]]


def test_three_lives_that_end_behind_a_step_are_told(results: Results) -> None:
    found, lives = of(results, "lives_end_behind_one_step")[0]
    # The first life was counted by the ledgers alone, and these were lost.
    assert found == [2, 2, 2, 2, 2]
    assert lives == [3]
