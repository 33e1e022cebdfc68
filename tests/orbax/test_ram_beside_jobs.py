"""RAM beside Orbax's own object in a job of two slices of two hosts, at both faces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from orbax_faces import FACES
from running_jobs import ByProgram, job_root, run_life, spec_of

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def job() -> Iterator[ByProgram]:
    with job_root() as root:
        yield ByProgram(run_life(spec_of(root, "ram_beside_job.py"), root))


@pytest.fixture(params=list(FACES))
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_one_full_ramdisk_leaves_storage_to_all(job: ByProgram, kind: str) -> None:
    stored, latest, first, found, events = zip(*job[f"full, {kind}"], strict=True)
    assert stored == ([0, 2, 4],) * 4
    assert latest == found == (4,) * 4
    assert first == (0,) * 4
    assert events == (1,) * 4


def test_restore_beside_one_full_ramdisk_comes_from_storage(job: ByProgram, kind: str) -> None:
    stored, latest, first, found, events = zip(*job[f"full and load, {kind}"], strict=True)
    assert stored == ([0, 2, 4],) * 4
    assert latest == found == (4,) * 4
    assert first == (0,) * 4
    assert events == (1,) * 4


def test_one_refused_ramdisk_leaves_storage_to_all(job: ByProgram, kind: str) -> None:
    assert job[f"refused, {kind}"] == [[[0, 2], 2, 2, ["start"]]] * 4


def test_wrong_setting_at_one_process_is_told_to_all(job: ByProgram, kind: str) -> None:
    found = job[f"wrong, {kind}"]
    assert "stall_timeout_s" in found.pop(1)
    for (reason,) in found:
        assert "process 1: configure EmergencyCheckpointer: stall_timeout_s" in reason


@pytest.mark.parametrize(
    ("case", "process", "why"),
    [
        ("left out at 0", 0, "HostStateError: capture host_state['iterators']['data']"),
        ("left out at 1", 1, "HostStateError: capture host_state['iterators']['data']"),
        ("unfit at 1", 1, "InvalidState: save step 2: 'data'"),
    ],
)
def test_step_left_out_at_one_process_is_left_out_by_all(
    job: ByProgram, kind: str, case: str, process: int, why: str
) -> None:
    """The others learn of it at once: the processes meet before the next save."""
    for index, (*found, (reason,)) in enumerate(job[f"{case}, {kind}"]):
        assert found == [[0, 1, 1, 3], 3, 3, []]
        assert index == process or f"process {process}: {why}" in reason


@pytest.mark.parametrize("lost", ["one", "slice"])
def test_lost_copy_comes_from_the_other_slice(job: ByProgram, kind: str, lost: str) -> None:
    assert job[f"{lost} lost, {kind}"] == [[6, 6, 7, [0, 4], []]] * 4


def test_lost_copies_leave_the_step_of_storage(job: ByProgram, kind: str) -> None:
    """RAM has parts of step 6, which is not whole."""
    assert job[f"both copies lost, {kind}"] == [[4, 4, 7, [0, 4], []]] * 4


def test_rollback_forgets_newer_steps_of_ram(job: ByProgram, kind: str) -> None:
    assert job[f"rolled back, {kind}"] == [[5, 0, 2, 2, 2]] * 4


def test_dropped_managers_leave_ram_to_the_next(job: ByProgram, kind: str) -> None:
    assert job[f"dropped, {kind}"] == [[3, 3, []]] * 4


def test_second_manager_at_once_has_no_ram_on_all_processes(job: ByProgram, kind: str) -> None:
    assert job[f"two at once, {kind}"] == [[1, 0, 1, 0, ["start"]]] * 4


def test_evaluators_read_storage_beside_those_that_train(job: ByProgram) -> None:
    assert job["evaluated"] == [[2, 2, 2, [2], 4, 4, 4, [2, 4], 5, 0]] * 4
