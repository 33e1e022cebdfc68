"""Prefetches on four real processes: two slices of two hosts. See ``prefetch_job.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running_jobs import job_root, of, run_life, spec_of

ALL = 1386  # bytes that each process holds


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    with job_root() as root:
        yield run_life(spec_of(root, "prefetch_job.py"), root)


def check_whole(seen: list[dict[str, Any]], step: int, *, overlapped: bool) -> None:
    assert [s.get("step") for s in seen] == [step] * 4, seen
    assert [s["differences"] for s in seen] == [[]] * 4
    assert [s["iterator_right"] for s in seen] == [True] * 4
    assert [s["overlapped"] for s in seen] == [overlapped] * 4


def test_bytes_are_there_before_restore_is_called(results: list[dict[str, Any]]) -> None:
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
        assert not {"restore.planned", "restore.fetched"} & set(s["after"])
    check_whole([pair[1] for pair in both], 20, overlapped=False)


def test_source_that_goes_bad_meanwhile(results: list[dict[str, Any]]) -> None:
    seen = of(results, "source_damaged")
    check_whole(seen, 5, overlapped=True)
    assert all(s["before"].count("restore.planned") == 2 for s in seen)
    assert "restore.quarantined" in seen[0]["before"]


def test_failure_is_told_by_the_next_restore_on_all(results: list[dict[str, Any]]) -> None:
    both = of(results, "one_asks_for_another_state")
    for process, (told, _) in enumerate(both):
        assert told["error"] == "RestoreFailed"
        said = "wide: absent here" if process == 1 else "process 1 asks for other leaves"
        assert said in told["text"]
        assert not told["moved"]
    check_whole([then for _, then in both], 10, overlapped=False)


def test_all_use_it_or_none(results: list[dict[str, Any]]) -> None:
    seen = of(results, "one_restores_another_step")
    check_whole(seen, 10, overlapped=False)
    (told,) = seen[0]["unused"]
    assert told == "process 2: step 10 was prefetched, not None"
    assert [s["moved"] for s in seen] == [[ALL, 0]] * 4


@pytest.mark.parametrize("program", ["save_comes_first", "save_comes_first_late_on_one"])
def test_save_before_the_restore(results: list[dict[str, Any]], program: str) -> None:
    seen = of(results, program)
    check_whole(seen, 15, overlapped=False)
    assert "step 15 was saved before the restore" in seen[0]["unused"][0]


def test_host_state_that_one_process_refuses(results: list[dict[str, Any]]) -> None:
    seen = of(results, "host_state_refused")
    for told, stayed, _ in seen:
        assert told["error"] == "RestoreFailed"
        assert "stubborn" in told["text"]
        assert stayed
    check_whole([then for _, _, then in seen], 10, overlapped=False)
