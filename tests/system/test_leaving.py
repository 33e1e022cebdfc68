"""Two real processes, of which one leaves: the other one knows it at once, and why."""

from __future__ import annotations

from job_results import Results, results_of
from running_jobs import of

results = results_of("leaving_job.py", hosts=1)


def test_save_after_a_process_raised_names_it(results: Results) -> None:
    stayed, left = of(results, "one_raises")
    assert stayed["complete"] == left["complete"] == [5]
    assert stayed["stored"] == []
    said = "process 1 has left: ValueError: boom"
    assert [said in error for error in stayed["errors"]] == [True] * 2, stayed["errors"]
    # The saves of step 10 to RAM and to storage fail at once: the newer error is the one raised.
    known = any("step 10 to the persistent tier" in error for error in stayed["errors"])
    told = "the save of step 10 to storage failed" in stayed["ended"]
    assert told != known, "training knows of the lost step once, at the latest at its end"
    assert left["ended"] == "", "its own exception counts"


def test_all_that_end_together_lose_no_save(results: Results) -> None:
    for seen in of(results, "all_end"):
        assert seen == {"complete": [5, 10], "stored": [5, 10], "errors": [], "ended": ""}


def test_process_that_skips_saves_costs_one_deadline(results: Results) -> None:
    """The others know it in the saves after that, and wait again once it takes part again."""
    stayed, skipped = of(results, "one_skips")
    assert stayed["complete"] == skipped["complete"] == [5, 25, 30]
    outcomes = {int(step): text for step, text in stayed["outcomes"].items()}
    again = "process 1 is late again"
    assert {step: again in text for step, text in outcomes.items() if text} == {
        10: False,
        15: True,
        20: True,
    }
