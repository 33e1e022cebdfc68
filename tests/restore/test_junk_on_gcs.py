"""In a bucket, too, what others leave hides no step; and looks at it cost few requests each."""

from __future__ import annotations

import pytest
from programs import printed_beside_bucket

REQUESTS_A_LOOK = 8
REQUESTS_BESIDES = 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [20, 200, pytest.param(2000, marks=pytest.mark.slow)])
def test_steps_of_a_bucket_among_junk_are_the_whole_ones(count: int) -> None:
    found = printed_beside_bucket("junk_program.py", str(count))
    assert found["whole"] == [10, 20]
    # A quarter was not committed: nobody knows whose save it is, and it does not count.
    assert found["passed_over"] == count - count // 4
    assert found["left"] == 1
    assert found["listing"] < REQUESTS_BESIDES
    assert found["requests"] < REQUESTS_A_LOOK * count + REQUESTS_BESIDES
    assert found["described"] < REQUESTS_BESIDES
