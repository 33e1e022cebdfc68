"""Prefetches on four real processes: two slices of two hosts. See ``prefetch_job.py``."""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import of

ALL = 1386  # bytes that each process holds


results = results_of("prefetch_job.py")


def check_whole(seen: Results, step: int, *, overlapped: bool) -> None:
    for s in seen:
        assert s.get("step") == step, seen
        assert s["differences"] == []
        assert s["iterator_right"]
        assert s["overlapped"] == overlapped


def test_bytes_are_there_before_restore_is_called(results: Results) -> None:
    """Survivors serve while they are in the middle of their own part: they wait for the others."""
    both = of(results, "slice_lost")
    seen = [pair[0] for pair in both]
    check_whole(seen, 10, overlapped=True)
    assert [s["moved"] for s in seen] == [[ALL, 0], [ALL, 0], [0, ALL], [0, ALL]]
    assert [sum(s["received"].values()) for s in seen] == [0, 0, ALL, ALL]
    assert [s["received"].keys() <= {"process/0", "process/1"} for s in seen] == [True] * 4
    for s in seen:
        assert {"prefetch.started", "restore.planned", "restore.fetched"} <= set(s["before"])
        assert "restore.started" not in s["before"]
        assert "restore.finished" in s["after"]
        assert not {"restore.fetched", "restore.received"} & set(s["after"])
    check_whole([pair[1] for pair in both], 20, overlapped=False)


def test_source_that_goes_bad_meanwhile(results: Results) -> None:
    seen = of(results, "source_damaged")
    check_whole(seen, 5, overlapped=True)
    assert all(s["before"].count("restore.planned") == 2 for s in seen)
    assert "restore.quarantined" in seen[0]["before"]


def test_failed_prefetch_has_no_effect(results: Results) -> None:
    both = of(results, "one_asks_for_another_state")
    for process, (_, (reason,)) in enumerate(both):
        said = "wide: absent here" if process == 1 else "process 1 asks for other leaves"
        assert said in reason
    check_whole([seen for seen, _ in both], 10, overlapped=False)


def test_process_without_a_cache_loads_alone(results: Results) -> None:
    both = of(results, "one_has_no_cache")
    seen = [pair[0] for pair in both]
    check_whole(seen[:3], 10, overlapped=True)
    check_whole(seen[3:], 10, overlapped=False)
    assert ["restore.fetched" in s["after"] for s in seen] == [False, False, False, True]
    assert [s["unused"] for s in seen] == [[], [], [], ["another state was prefetched"]]
    assert [s["moved"] for s in seen] == [[ALL, 0]] * 4
    check_whole([pair[1] for pair in both], 15, overlapped=False)


def test_copies_that_go_bad_after_it_elsewhere(results: Results) -> None:
    seen = of(results, "copies_lost_where_there_is_no_cache")
    check_whole(seen, 5, overlapped=False)
    assert [s["after"].count("restore.planned") for s in seen] == [2] * 4
    for s in (seen[0], seen[2]):
        assert s["unused"] == ["step 10 was prefetched, and 5 is restored"]


def test_saves_while_the_others_wait_for_one(results: Results) -> None:
    both = of(results, "one_never_prefetches")
    check_whole([seen for seen, _ in both], 20, overlapped=False)
    told = "step 15 was saved before the restore"
    assert [given_up for _, given_up in both] == [[told]] * 3 + [[]]


@pytest.mark.parametrize("program", ["save_comes_first", "save_comes_first_late_on_one"])
def test_save_before_the_restore(results: Results, program: str) -> None:
    seen = of(results, program)
    check_whole(seen, 15, overlapped=False)
    assert "step 15 was saved before the restore" in seen[0]["unused"][0]


def test_host_state_that_one_process_refuses(results: Results) -> None:
    seen = of(results, "host_state_refused")
    for told, stayed, _ in seen:
        assert told["error"] == "RestoreFailed"
        assert "stubborn" in told["text"]
        assert stayed
    check_whole([then for _, _, then in seen], 10, overlapped=False)
