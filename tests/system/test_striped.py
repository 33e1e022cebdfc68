"""Fewer copies than slices, on four real processes: four slices of one host, unless said.

The programs of ``striped_job.py`` run in one job; each test here judges one of them. Two copies on
four slices: hosts 0 and 1 hold one part of the state, hosts 2 and 3 the other.
"""

from __future__ import annotations

from typing import Any

from job_results import Results, results_of
from running_jobs import check_whole, moved, of

ALL = 2634  # bytes of the state, which each process holds
LARGEST = 2048  # bytes of its largest shard: the one group has it, and nothing else
REST = ALL - LARGEST


results = results_of("striped_job.py", slices=4, hosts=1)


def nbytes(shards: list[list[Any]]) -> int:
    return sum(size for _, _, size in shards)


def test_each_host_keeps_its_part_and_fetches_the_rest(results: Results) -> None:
    seen = of(results, "nothing_lost")
    check_whole(seen, 10)
    assert [nbytes(s["stored"]) for s in seen] == [LARGEST, LARGEST, REST, REST]
    assert moved(seen) == [(LARGEST, REST)] * 2 + [(REST, LARGEST)] * 2
    # What was fetched is not kept: the RAM tier is no larger for it.
    assert all(s["then"] == s["stored"] for s in seen)


def test_lost_host_is_a_holder_of_its_part_again(results: Results) -> None:
    outcomes = of(results, "host_lost")
    first, then = [each[0] for each in outcomes], [each[1] for each in outcomes]
    check_whole(first, 10)
    assert moved(first) == [(LARGEST, REST), (0, ALL), (REST, LARGEST), (REST, LARGEST)]
    assert all(again for _, _, again in outcomes)
    check_whole(then, 10)
    assert moved(then) == [(0, ALL), (LARGEST, REST), (REST, LARGEST), (REST, LARGEST)]


def test_lost_group_is_named_and_nothing_is_restored(results: Results) -> None:
    for seen in of(results, "a_group_lost"):
        assert seen["error"] == "Unrecoverable"
        assert "held nowhere: bytes[0:16, 0:2]" in seen["text"]


def test_lost_group_comes_back_from_storage(results: Results) -> None:
    outcomes = of(results, "persistent_after_a_group_lost")
    check_whole([each[0] for each in outcomes], 5, "persistent")
    assert sum(each[0]["persistent"] for each in outcomes) == ALL, "each byte is read once"
    assert all(again for _, _, again in outcomes)
    check_whole([each[1] for each in outcomes], 5)


def test_three_copies_on_four_slices_survive_any_two(results: Results) -> None:
    seen = of(results, "three_copies_of_four")
    check_whole(seen, 10)
    sizes = [nbytes(s["stored"]) for s in seen]
    assert sum(sizes) == 3 * ALL
    assert max(sizes) - sum(sizes) / 4 <= LARGEST
    assert moved(seen)[1] == moved(seen)[2] == (0, ALL)


def test_one_copy_of_two_slices_whose_hosts_share_leaves(results: Results) -> None:
    seen = of(results, "one_copy_of_two_slices")
    check_whole(seen, 10)
    shards = [(leaf, box) for s in seen for leaf, box, _ in s["stored"]]
    assert len(shards) == len(set(shards))  # also of leaves that every host of a slice holds
    assert sum(nbytes(s["stored"]) for s in seen) == ALL
    assert all(s["local"] == nbytes(s["stored"]) for s in seen)


def test_slices_in_another_order_store_what_their_place_needs(results: Results) -> None:
    both = of(results, "slices_swapped")
    check_whole([pair[0] for pair in both], 10)
    check_whole([pair[1] for pair in both], 10)


def test_another_mesh_finds_the_parts_and_stores_them_its_way(results: Results) -> None:
    both = of(results, "other_mesh")
    check_whole([pair[0] for pair in both], 10)
    check_whole([pair[1] for pair in both], 10)


def test_with_fewer_copies_than_were_saved_nothing_moves(results: Results) -> None:
    seen = of(results, "other_copies")
    check_whole(seen, 10)
    assert moved(seen) == [(ALL, 0)] * 4


def test_step_that_one_group_did_not_publish_is_not_whole(results: Results) -> None:
    seen = of(results, "partners_did_not_save")
    check_whole(seen, 5)
    assert [step for step, _ in seen[0]["rejected"]] == [10]
    assert "held nowhere" in seen[0]["rejected"][0][1]


def test_damaged_copy_is_replaced_by_the_other_one(results: Results) -> None:
    seen = of(results, "damaged_copy")
    check_whole(seen, 10)
    assert all("bytes" in each["shard"] for s in seen for each in s["quarantined"])
    assert any(each["holder"] == "process/3" for each in seen[3]["quarantined"])


def test_restored_state_is_its_own(results: Results) -> None:
    outcome = {"step": 30, "differences": []}
    assert of(results, "restored_state_outlives_saves") == [outcome] * 4
