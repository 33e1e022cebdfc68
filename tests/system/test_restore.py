"""Every restore scenario, on four real processes: two slices of two hosts.

The programs of ``restore_job.py`` run in one job; each test here judges one of them. All numbers of
bytes follow from the leaves of ``world.LEAVES``. ``test_lives.py`` renumbers hosts.
"""

from __future__ import annotations

import pytest
from job_results import Results, results_of
from running_jobs import check_whole, moved, of

pytestmark = pytest.mark.core

ALL = 1386  # bytes that each process holds
REPLICATED = 138  # of these, what every process of a slice holds alike


results = results_of("restore_job.py")


def test_survivors_read_only_their_own_ram(results: Results) -> None:
    seen = of(results, "nothing_lost")
    check_whole(seen, 10)
    assert moved(seen) == [(ALL, 0)] * 4


def test_lost_slice_comes_back_from_its_peer_and_is_holder_again(results: Results) -> None:
    both = of(results, "slice_lost")
    first, then = [pair[0] for pair in both], [pair[1] for pair in both]
    check_whole(first, 10)
    assert moved(first) == [(ALL, 0), (ALL, 0), (0, ALL), (0, ALL)]
    check_whole(then, 10)
    assert moved(then) == [(0, ALL), (0, ALL), (ALL, 0), (ALL, 0)]


def test_lost_process_gets_its_unwanted_host_state_back(results: Results) -> None:
    both = of(results, "tensors_restored_after_a_loss")
    for first, _ in both:
        assert (first["step"], first["differences"], first["iterator"]) == (10, [], [-1, 0])
    check_whole([then for _, then in both], 10)


def test_lost_process_gets_back_that_it_has_no_host_state(results: Results) -> None:
    for seen in of(results, "nothing_beside_tensors_after_losses"):
        assert [(each["step"], each["differences"]) for each in seen] == [(10, [])] * 2


def test_slices_may_be_swapped(results: Results) -> None:
    seen = of(results, "slices_swapped")
    check_whole(seen, 10)
    assert moved(seen) == [(ALL, 0)] * 4


def test_damaged_shard_comes_from_a_peer_and_is_named(results: Results) -> None:
    seen = of(results, "corrupt_shard")
    check_whole(seen, 10)
    damaged = seen[1]
    assert damaged["local"] + damaged["peer"] == ALL
    assert 0 < damaged["peer"] < ALL
    (warning,) = damaged["quarantined"]
    assert warning["holder"] == "process/1"
    assert "bytes" in warning["shard"]
    assert moved(seen[:1] + seen[2:]) == [(ALL, 0)] * 3


def test_mended_copy_is_used_when_the_peer_is_lost(results: Results) -> None:
    first, second = zip(*of(results, "mended_and_lost"), strict=True)
    check_whole(list(first), 10)
    check_whole(list(second), 10)
    assert [s["quarantined"] for s in second] == [[]] * 4


def test_shard_damaged_everywhere_leads_to_the_older_step(results: Results) -> None:
    seen = of(results, "corrupt_everywhere")
    check_whole(seen, 5)
    assert all(s["rejected"][0][0] == 10 for s in seen)


def test_iterator_that_cannot_be_set_back_ends_no_restore(results: Results) -> None:
    seen = of(results, "iterator_not_set_back")
    check_whole(seen, 5)
    assert all(s["rejected"][0][0] == 10 for s in seen)


def test_process_that_cannot_begin_is_an_error_for_all_by_name(results: Results) -> None:
    """Nobody waits for it, and the next restore finds all processes."""
    first, second, third, _, then, _ = zip(*of(results, "part_not_begun"), strict=True)
    assert [kind for kind, _ in first] == ["InvalidState", *["RestoreFailed"] * 3]
    assert all("process 0: InvalidState: " in text for _, text in first[1:])
    kinds = ["RestoreFailed", "RestoreFailed", "HostStateError", "RestoreFailed"]
    assert [kind for kind, _ in second] == kinds
    named = "restore the job: process 2: HostStateError: "
    assert all(text.startswith(named) for _, text in (*second[:2], second[3]))
    kinds = ["RestoreFailed", "InvalidState", "RestoreFailed", "RestoreFailed"]
    assert [kind for kind, _ in third] == kinds
    named = "restore the job: process 1: InvalidState: "
    assert all(text.startswith(named) for _, text in (third[0], *third[2:]))
    assert then == (10,) * 4


def test_invalid_step_on_all_is_the_same_error_on_all(results: Results) -> None:
    for _, _, _, (kind, text), _, _ in of(results, "part_not_begun"):
        assert kind == "InvalidState"
        assert "process " not in text


def test_announced_saves_complete_after_refused_restores(results: Results) -> None:
    """All processes read the same list of steps, also those that could not begin."""
    assert [seen[-1] for seen in of(results, "part_not_begun")] == [True] * 4


def test_truncated_manifest_counts_as_absent(results: Results) -> None:
    seen = of(results, "truncated_manifest")
    check_whole(seen, 10)
    assert moved(seen)[2] == (0, ALL)


def test_step_without_some_manifest_is_not_whole(results: Results) -> None:
    seen = of(results, "missing_manifest_everywhere")
    check_whole(seen, 5)
    assert "held nowhere" in seen[0]["rejected"][0][1]


def test_step_without_some_host_state_is_not_whole(results: Results) -> None:
    seen = of(results, "host_state_missing")
    check_whole(seen, 5)
    assert "1 of 4 host states are held nowhere: process 1" in seen[0]["rejected"][0][1]


def test_two_lives_are_never_mixed_into_one_step(results: Results) -> None:
    seen = of(results, "two_incarnations")
    check_whole(seen, 5)
    assert [step for step, _ in seen[0]["rejected"]] == [10, 10]


def test_newer_of_two_steps_on_different_hosts(results: Results) -> None:
    seen = of(results, "two_steps_on_different_hosts")
    check_whole(seen, 10)
    assert moved(seen) == [(ALL, 0), (ALL, 0), (0, ALL), (0, ALL)]


@pytest.mark.parametrize("program", ["other_mesh", "other_mesh_after_loss"])
def test_another_mesh(results: Results, program: str) -> None:
    seen = of(results, program)
    check_whole(seen, 10)
    assert sum(s["peer"] for s in seen) > 0


def test_part_of_a_host_without_room_is_kept_by_others(results: Results) -> None:
    """What a process has gathered is not all: a peer has its part in no RAM of its own."""
    seen = of(results, "other_places_beside_full_ramdisks")
    if None in seen:
        pytest.skip("mounting a tmpfs needs privileges")
    for life in range(2):
        check_whole([both[life] for both in seen], 10)


def test_persistent_tier_when_ram_lost_too_much(results: Results) -> None:
    seen = of(results, "more_lost_than_copies")
    check_whole(seen, 5, "persistent")
    assert sum(s["persistent"] for s in seen) == 2 * ALL - REPLICATED, (
        "each byte is read once over the job"
    )


def test_unrecoverable_says_what_is_lost(results: Results) -> None:
    for seen in of(results, "unrecoverable"):
        assert seen["error"] == "Unrecoverable"
        assert "embed[0:16, 0:16]" in seen["text"] or "and 3 more" in seen["text"]
        assert "process 0, 2" in seen["text"]


def test_requested_step_and_what_was_newer(results: Results) -> None:
    both = of(results, "requested_step")
    check_whole([pair[0] for pair in both], 5)
    check_whole([pair[1] for pair in both], 10)
    check_whole([pair[2] for pair in both], 7)
    assert all(pair[3]["error"] == "StepNotFound" for pair in both)


def test_processes_that_ask_for_other_steps_restore_none(results: Results) -> None:
    first, newest, then = zip(*of(results, "other_steps"), strict=True)
    for errors, asked in ((first, "step 10"), (newest, "the newest complete step")):
        assert {error["error"] for error in errors} == {"RestoreFailed"}
        text = f"process 2 asks for {asked}, process 0 for step 5"
        assert all(text in error["text"] for error in errors)
    check_whole(list(then), 10)


def test_another_runs_ramdisk_is_neither_restored_nor_removed(results: Results) -> None:
    for seen in of(results, "another_run"):
        assert seen["beside"] == {"step": None, "untouched": True}
    check_whole([seen["then"] for seen in of(results, "another_run")], 10)


def test_one_unusable_ramdisk_is_everyones_error(results: Results) -> None:
    seen = of(results, "one_ramdisk_unusable")
    assert [s["error"] for s in seen] == [
        "RestoreFailed",
        "LocalTierError",
        "RestoreFailed",
        "RestoreFailed",
    ]
    assert all("not_a_directory" in s["text"] for s in seen)
