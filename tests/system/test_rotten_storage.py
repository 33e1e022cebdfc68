"""A value of storage that is not the one that was saved is never restored, nor kept in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, of, run_life, spec_of


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "rotten_storage_job.py", hosts=1), root)


@pytest.mark.parametrize("program", ["same_mesh", "other_mesh"])
def test_older_step_is_taken_now_and_in_the_next_life(
    results: list[dict[str, Any]], program: str
) -> None:
    for first, second in of(results, program):
        for seen in (first, second):
            assert (seen["step"], seen["differences"]) == (5, [])
            assert seen["iterator_right"]
            # Not whole in RAM either: what was read of it did not pass for it.
            assert {rejected[0] for rejected in seen["rejected"]} == {10}
        assert (first["tier"], second["tier"]) == ("persistent", "local")
