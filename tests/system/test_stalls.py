"""What stands still ends a restore or a save, by name; what is slow does not. ``stall_job.py``."""

from __future__ import annotations

from typing import Any

from job_results import Results, results_of
from running_jobs import check_whole, of

STALL_S = 3.0
SOON_S = 30.0
"""Ten times the limit; the total of the job is a minute."""
results = results_of("stall_job.py")


def failed(seen: list[dict[str, Any]], error: str, words: str) -> None:
    """All processes ended with the same error, which names who is at fault, and soon."""
    for each in seen:
        assert each.get("error") == error, seen
        assert words in each["text"], seen
        assert each["seconds"] < SOON_S


def test_stuck_peer_ends_the_restore_by_name(results: Results) -> None:
    stuck, again = zip(*of(results, "stuck_peer"), strict=True)
    failed(list(stuck), "HolderUnreachable", "no holder could be reached: process/")
    check_whole(list(again), 10)


def test_stuck_read_ends_the_restore_by_name(results: Results) -> None:
    stuck, again = zip(*of(results, "stuck_read"), strict=True)
    failed(list(stuck), "StorageUnreachable", "process 3: ")
    failed(list(stuck), "StorageUnreachable", "nothing has moved for 3")
    check_whole(list(again), 10, "persistent")


def test_slow_reads_of_all_end_well(results: Results) -> None:
    seen = of(results, "slow_reads")
    check_whole(seen, 10, "persistent")
    assert all(each["seconds"] > 2 * STALL_S for each in seen)
    told = seen[0]["told"]
    assert told[0]["doing"] in ("load", "")
    assert [each for each in told if each.get("slowest") == 3]
    of_slowest = [each for each in seen[3]["told"] if each["doing"] == "load"]
    assert of_slowest[-1]["bytes_per_second"] > 0
    assert [each["bytes_left"] for each in of_slowest] == sorted(
        (each["bytes_left"] for each in of_slowest), reverse=True
    )
    assert all(each["told"][-1]["bytes_left"] == 0 for each in seen)


def test_frozen_process_is_named_by_the_others(results: Results) -> None:
    stuck, again = zip(*of(results, "frozen"), strict=True)
    failed(list(stuck)[:3], "DeadlineExceeded", "process 3 has sent nothing")
    assert stuck[3].get("error") == "DeadlineExceeded", "it learns that nobody has waited"
    # Nothing of a restore that failed stays in RAM, so that storage is read once more.
    check_whole(list(again), 10, "persistent")


def test_job_that_is_paused_as_a_whole_goes_on(results: Results) -> None:
    seen = of(results, "paused")
    check_whole(seen, 10, "persistent")
    assert all(each["seconds"] > 4 * STALL_S for each in seen), "it was paused"


def test_save_of_a_job_that_is_paused_as_a_whole_goes_on(results: Results) -> None:
    for each in of(results, "paused_in_a_save"):
        assert each["error"] == ""
        assert each["seconds"] > 4 * STALL_S, "it was paused"


def test_stuck_write_ends_the_save_by_name(results: Results) -> None:
    seen = of(results, "stuck_write")
    for each in seen:
        assert each["error"].startswith("SaveFailed"), seen
        assert each["seconds"] < SOON_S
    assert all("process 1 failed" in each["error"] for each in (seen[0], *seen[2:])), seen
    assert "nothing has moved for 3" in seen[1]["error"]
