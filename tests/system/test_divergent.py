"""Replicas that differ, on four real processes: four slices of one host, or two of two.

The programs of ``divergent_job.py`` run in one job; each test here judges one of them.
"""

from __future__ import annotations

from job_results import Results, results_of
from running_jobs import check_whole, moved, of

ALL = 2634  # bytes of the state, which each process needs
SHARD = 32  # bytes of the altered leaf


results = results_of("divergent_job.py", slices=4, hosts=1)


def test_majority_replaces_an_altered_copy(results: Results) -> None:
    first = [pair[0] for pair in of(results, "one_of_three")]
    check_whole(first, 10)
    # Process 2 survived, and yet it does not restore its own bytes.
    assert moved(first) == [(0, ALL), (ALL, 0), (ALL - SHARD, SHARD), (ALL, 0)]
    (text,) = first[0]["divergence"]
    assert "step 10: copies of bytes[0:16, 0:2] differ" in text
    assert "at process/1, process/3; " in text
    assert " at process/2; " in text
    assert "the majority's (2 of 3), is restored" in text
    (marked,) = first[2]["quarantined"]
    assert marked["holder"] == "process/2"
    assert marked["shard"] == "bytes[0:16, 0:2]"
    assert "most holders have other bytes" in marked["detail"]
    assert [s["quarantined"] for s in first[:2] + first[3:]] == [[]] * 3


def test_mended_copy_has_the_majoritys_bytes(results: Results) -> None:
    then = [pair[1] for pair in of(results, "one_of_three")]
    check_whole(then, 10)
    assert then[2]["local"] == ALL
    assert [s["divergence"] for s in then] == [[]] * 4


def test_majority_of_striped_copies_is_restored(results: Results) -> None:
    seen = of(results, "one_of_three_striped")
    check_whole(seen, 10)
    (text,) = seen[0]["divergence"]
    assert "(2 of 3), is restored" in text
    assert [len(s["quarantined"]) for s in seen] == [0, 1, 0, 0]


def test_altered_copy_is_not_used_without_the_majority(results: Results) -> None:
    seen = of(results, "majority_is_lost")
    check_whole(seen, 5)
    assert seen[0]["rejected"][0][0] == 10


def test_tie_warns_and_names_both_holders(results: Results) -> None:
    seen = of(results, "tie_warns")
    assert [s["step"] for s in seen] == [10] * 4
    assert [bool(s["differences"]) for s in seen] == [False, False, True, False]
    (text,) = seen[0]["divergence"]
    assert "step 10: copies of bytes[0:8, 0:2] differ" in text
    assert " at process/0; " in text
    assert " at process/2; " in text
    assert text.endswith("; no majority")


def test_tie_with_stop_raises_on_all_processes(results: Results) -> None:
    first = [pair[0] for pair in of(results, "tie_stops")]
    for seen in first:
        assert seen["error"] == "ReplicasDiffer"
        assert "restore step 10" in seen["text"]
        assert "bytes[0:8, 0:2]" in seen["text"]
        assert "process/0" in seen["text"]
        assert "process/2" in seen["text"]
    check_whole([pair[1] for pair in of(results, "tie_stops")], 5)


def test_storage_of_the_same_save_settles_a_tie(results: Results) -> None:
    seen = of(results, "tie_is_settled_by_storage")
    check_whole(seen, 10)
    assert seen[0]["peer"] > 0
    (text,) = seen[0]["divergence"]
    assert "process/2, storage" in text
    assert "(2 of 3)" in text
