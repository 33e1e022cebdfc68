"""Two real processes write one step together."""

from __future__ import annotations

from running_jobs import job_root, of, run_life, spec_of


def test_writers_begin_when_the_first_made_the_folder() -> None:
    """However long it takes the first writer to make it."""
    with job_root() as root:
        results = run_life(spec_of(root, "writers_job.py", slices=1, hosts=2), root)
    first, second = of(results, "slow_folder")
    assert first["was_there"] == [False], "the other writer came first"
    for seen in (first, second):
        assert (seen["complete"], seen["step"], seen["tier"]) == ([5], 5, "persistent")
        assert seen["differences"] == []
        assert seen["iterator_right"]
