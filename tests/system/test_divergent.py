"""Replicas that differ, on four real processes: four slices of one host, or two of two.

The programs of ``divergent_job.py`` run in one job; each test here judges one of them.
"""

from __future__ import annotations

from job_results import Results, results_of
from running_jobs import check_whole, moved, of

ALL = 2634  # bytes of the state, which each process needs
SHARD = 32  # bytes of the altered leaf


results = results_of("divergent_job.py", slices=4, hosts=1)


def test_holder_of_the_other_copy_alone_fetches(results: Results) -> None:
    first = [pair[0] for pair in of(results, "one_of_three")]
    check_whole(first, 10)
    # Process 2 survived, and yet it does not restore its own bytes.
    assert moved(first) == [(0, ALL), (ALL, 0), (ALL - SHARD, SHARD), (ALL, 0)]
    (text,) = first[0]["divergence"]
    assert "step 10: copies of bytes[0:16, 0:2] differ" in text
    assert "at process/1, process/3; " in text
    assert " at process/2" in text


def test_mended_copy_has_the_bytes_that_all_took(results: Results) -> None:
    then = [pair[1] for pair in of(results, "one_of_three")]
    check_whole(then, 10)
    assert then[2]["local"] == ALL
    assert [s["divergence"] for s in then] == [[]] * 4


def test_copies_that_differ_among_striped_ones(results: Results) -> None:
    """All four take the same copy, whichever it is, and the event names the shard."""
    seen = of(results, "one_of_three_striped")
    assert [(s["step"], s["tier"]) for s in seen] == [(10, "local")] * 4
    assert [s["differences"] for s in seen] == [seen[0]["differences"]] * 4
    assert len(seen[0]["divergence"]) == 1


def test_replicas_of_two_that_differ_do_not_stay_apart(results: Results) -> None:
    """Which one is right nobody knows; all take the same, and it has a second holder again."""
    both = of(results, "one_of_two")
    first = [pair[0] for pair in both]
    assert [s["step"] for s in first] == [10] * 4
    altered = [bool(s["differences"]) for s in first]
    assert altered in ([False] * 4, [True, False, True, False])
    (text,) = first[0]["divergence"]
    assert "step 10: copies of bytes[0:8, 0:2] differ" in text
    assert [bool(pair[1]["differences"]) for pair in both] == altered
    assert [pair[1]["divergence"] for pair in both] == [[]] * 4
