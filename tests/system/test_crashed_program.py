"""A program that crashes or raises in a job of many is the only one without a value."""

from __future__ import annotations

from running_jobs import job_root, of, run_life, spec_of


def test_job_with_a_crashing_program_runs_all_others() -> None:
    with job_root() as root:
        results = run_life(spec_of(root, "crashing_job.py", hosts=1), root)
    assert of(results, "before") == [0, 1]
    assert "DeadlineExceeded" in results[0]["parts"]["error"]
    assert results[1]["parts"] == {"error": "ValueError: scripted"}
    assert "ended with signal SIGKILL" in results[1]["crashes"]["error"]
    assert of(results, "after") == [0, 1]
