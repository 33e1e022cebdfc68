"""A run that ends well leaves its newest step in storage: jobs of four real processes."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from job_results import Results
from running_jobs import PROGRAM_TIMEOUT_S, check_whole, job_root, of, run_life, spec_of

from emergency_ckpt.tools.launch.process_set import POLL_S, ProcessSet

STORED, LAST = 2, 7
TWO_SLICES = (
    "good_end",
    "one_slice_lost_afterwards",
    "host_state_gone",
    "one_ends_by_an_exception",
    "leader_ends_by_an_exception",
)
FOUR_SLICES = ("good_end", "two_copies")


@pytest.fixture(scope="module")
def two() -> Any:
    with job_root() as root:
        yield run_life(spec_of(root, "last_step_job.py", *TWO_SLICES), root)


@pytest.fixture(scope="module")
def four() -> Any:
    """With more than two slices the first, which usually writes, keeps nothing in RAM."""
    with job_root() as root:
        spec = spec_of(root, "last_step_job.py", *FOUR_SLICES, slices=4, hosts=1)
        yield run_life(spec, root)


@pytest.mark.parametrize("shape", ["two", "four"])
def test_storage_alone_gives_the_newest_step_back(shape: str, two: Results, four: Results) -> None:
    seen = of({"two": two, "four": four}[shape], "good_end")
    assert [each["stored"] for each in seen] == [[LAST]] * 4
    assert [each["warned"] for each in seen] == [[]] * 4
    check_whole(seen, LAST, "persistent")


def test_ram_keeps_the_step_as_well(two: Results) -> None:
    check_whole(of(two, "one_slice_lost_afterwards"), LAST)


def _check_kept_back(seen: list[dict[str, Any]], reason: str) -> None:
    (text,) = seen[0]["warned"]
    assert text.startswith(f"the newest step in storage is none, in RAM {LAST}, which is lost")
    assert reason in text
    assert [each["stored"] for each in seen] == [[]] * 4
    assert [each["step"] for each in seen] == [None] * 4


def test_step_of_which_no_slice_keeps_all_is_named(four: Results) -> None:
    _check_kept_back(of(four, "two_copies"), "no slice keeps all of the state that it holds")


def test_step_without_a_host_state_is_named(two: Results) -> None:
    _check_kept_back(of(two, "host_state_gone"), "process 3 does not have its own in RAM")


def test_process_that_ends_by_an_exception_is_not_waited_for(two: Results) -> None:
    _check_kept_back(of(two, "one_ends_by_an_exception"), "process 1 has left: KeyError")


def test_leader_that_ends_by_an_exception_is_not_waited_for(two: Results) -> None:
    seen = of(two, "leader_ends_by_an_exception")
    assert [each["stored"] for each in seen] == [[]] * 4
    assert [each["step"] for each in seen] == [None] * 4


def test_death_in_the_last_save_leaves_no_step_that_counts() -> None:
    with job_root() as root:
        deadline_s = time.monotonic() + PROGRAM_TIMEOUT_S
        with ProcessSet(spec_of(root, "last_step_job.py", "dies")) as processes:
            while 0 in processes.running:
                assert time.monotonic() < deadline_s, "the last save did not come so far"
                processes.poll()
                time.sleep(POLL_S)
            (end,) = (end for end in processes.exits if end.process == 0)
            assert end.returncode == -signal.SIGKILL
            processes.end(grace_s=0)
        after = spec_of(root, "last_step_job.py", "after_the_death")
        check_whole(of(run_life(after, root, life=1), "after_the_death"), STORED, "persistent")
