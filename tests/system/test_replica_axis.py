"""The axis of the slices where none is named, on four real processes of two devices each.

The programs of ``axis_job.py`` run in one job; each test here judges one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from job_results import Results, results_of
from running_jobs import of

pytestmark = pytest.mark.timeout(600)


results = results_of("axis_job.py", devices=2)


def same_on_all(results: Results, program: str) -> dict[str, Any]:
    """What each process found, but for what process 0 alone is told, and the slices by process."""
    found = of(results, program)
    told, slices = (
        [each.pop("single_bytes") for each in found],
        [each.pop("slice") for each in found],
    )
    assert told[1:] == [[]] * 3
    assert all(each == found[0] for each in found)
    return {**found[0], "single_bytes": told[0], "slice_of": slices}


@pytest.mark.parametrize(
    ("program", "copies", "slice_of"),
    [
        ("size 1 first", {"2": 4, "4": 1}, "0011"),
        ("split first", {"2": 2, "4": 1}, "0101"),
        ("inside first", {"3": 2}, "0123"),
    ],
)
def test_axis_that_replicates_gives_copies_that_outlive_a_slice(
    results: Results, program: str, copies: dict[str, int], slice_of: str
) -> None:
    found = same_on_all(results, program)
    slices = sorted(set(slice_of))
    assert found["slices"] == len(slices)
    assert found["survival"] == [copies, slices]
    assert found["slice_of"] == [[slice_index] for slice_index in slice_of]
    assert found["single_bytes"] == []
    assert found["restored"] == [2, True]


def test_axis_of_size_1_that_is_named_warns_of_host_states(results: Results) -> None:
    first, *others = of(results, "size 1 named")
    (single,) = first["single"]
    assert "each process's host state has one copy in RAM" in single
    assert "axis 'fsdp' (replica_axis) of {'slice': 8, 'fsdp': 1} has size 1" in single
    (passed,) = first["passed"]
    assert passed.startswith("step 4 is restored, and newer steps are passed over: step 6 in RAM (")
    assert "host states are held nowhere: process 3" in passed
    assert all(each == {"single": [], "restored": 4, "passed": []} for each in others)


def test_leaf_split_on_every_axis_leaves_others_their_copies(results: Results) -> None:
    found = same_on_all(results, "one leaf on every axis")
    assert (found["slices"], found["single_bytes"]) == (2, [64])
    assert found["survival"] == [{"1": 8, "2": 5}, []]
    assert found["restored"] == [2, True]


def test_leaf_split_on_every_axis_is_stored_by_one_slice(results: Results) -> None:
    found = same_on_all(results, "one leaf on every axis, stored")
    assert (found["slices"], found["single_bytes"]) == (1, [64])
    assert found["survival"][0] == {"1": 8, "2": 4, "4": 1}
    assert found["restored"] == [2, True]


def test_axis_that_replicates_more_bytes_is_taken(results: Results) -> None:
    found = same_on_all(results, "more bytes along the second")
    assert found["slice_of"] == [["0"], ["1"], ["0"], ["1"]]
    assert found["single_bytes"] == [64]


def test_maxtext_mesh_restores_from_ram_without_a_slice(results: Results) -> None:
    for found in of(results, "MaxText"):
        assert found["steps"] == [0, 2]
        assert found["survival"] == [{"2": 4}, ["0", "1"]]
        assert found["restored"]


def test_manager_of_a_mesh_of_one_axis_uses_its_replicas(results: Results) -> None:
    for found in of(results, "manager of a mesh of one axis"):
        assert found["steps"] == [0, 2]
        assert found["survival"] == [{"3": 1}, ["0", "1", "2", "3"]]
        assert found["restored"]


def test_maxtext_mesh_without_replicas_saves_to_ram_on_request(results: Results) -> None:
    assert of(results, "MaxText without replicas") == [{"steps": [0]}] * 4
    for found in of(results, "MaxText without replicas, in RAM"):
        assert found["steps"] == [0, 2]
        assert found["survival"] == [{"1": 8}, []]
        assert found["restored"]
