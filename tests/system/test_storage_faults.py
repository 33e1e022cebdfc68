"""Every fault of storage, on a save and on a restore: training goes on, nothing hangs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from fake_gcs import FakeGcs
from running_jobs import job_root, run_life, spec_of
from storage_faults_job import HANGS, RESTORE_FAULTS, SAVE_FAULTS, USUAL_RESTORES, USUAL_SAVES

pytestmark = pytest.mark.timeout(900)

PASSING_SAVES = {
    "overloaded",
    "unavailable",
    "reset",
    "slow",
    "lost_reply",
    "marker_precondition",
}
FAILING_SAVES = {"down", "stalled", "denied", "beside_denied", "marker_denied"}
UNREACHABLE = {"data_down", "stalled", "trickling", "down"}
"""Nothing says that the newest step is gone: no older one is taken in its place."""


def run(program: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with FakeGcs(buckets=["bucket"]) as gcs, job_root() as root:
        for name, value in gcs.environment().items():
            monkeypatch.setenv(name, value)
        spec = spec_of(root, "storage_faults_job.py", program, slices=1, hosts=2)
        results = run_life(spec, root)
    assert all("value" in result[program] for result in results), results
    return [result[program]["value"] for result in results]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module")
def results(patch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """What a program of the job found; each is run once."""
    return functools.cache(lambda program: run(program, patch))


def cases(faults: Iterable[str], usual: Iterable[str]) -> list[Any]:
    return [
        pytest.param(fault, marks=() if fault in usual else pytest.mark.slow)
        for fault in sorted(faults)
    ]


@pytest.mark.parametrize("fault", cases(SAVE_FAULTS, USUAL_SAVES))
def test_save_under_a_fault(results: Callable[[str], list[Any]], fault: str) -> None:
    program = "usual_saves" if fault in USUAL_SAVES else "more_saves"
    for seen in (result[fault] for result in results(program)):
        before, during, after = seen["outcomes"]
        assert (before, after) == ("", ""), "the saves before and after are whole"
        assert (seen["then"]["step"], seen["then"]["wrong"]) == (15, [])
        if fault in PASSING_SAVES:
            assert during == ""
        if fault in FAILING_SAVES:
            assert "step 10 to the persistent tier" in during
            assert "the next persistent save tries again" in during
            assert seen["failed"] == [10]
        # A thread that waits in Orbax for the other writer would abort the process at its end.
        assert seen["at_storage"] == []
        if during == "":  # then it must be good
            assert (seen["step_10"]["step"], seen["step_10"]["wrong"]) == (10, [])


@pytest.mark.parametrize("fault", ["stalled", "trickling"])
def test_bucket_that_stalls_ends_a_restore_soon(
    results: Callable[[str], list[Any]], fault: str
) -> None:
    """Far from its total, with a limit of three seconds, and with time left to describe a step."""
    for seen in results("stalls"):
        assert seen[fault].get("error") == "StorageUnreachable", seen
        assert seen[fault]["seconds"] < 60
        assert seen[fault]["at_storage"] == []
        assert (seen["then"]["step"], seen["then"]["wrong"]) == (5, [])


@pytest.mark.parametrize("fault", cases(RESTORE_FAULTS, USUAL_RESTORES))
def test_restore_under_a_fault(results: Callable[[str], list[Any]], fault: str) -> None:
    program = "usual_restores" if fault in USUAL_RESTORES else "more_restores"
    for process, seen in enumerate(result[fault] for result in results(program)):
        if fault == "denied":
            assert seen["error"] == ("RestoreFailed" if process else "PersistentTierError")
            assert "credentials" in seen["text"]
            continue
        if fault in UNREACHABLE:
            assert seen["error"] == "StorageUnreachable", seen
            assert "restore again" in seen["text"]
            assert "remove" not in seen["text"]
            assert seen["at_storage"] == []
            continue
        assert (seen["step"], seen["wrong"]) == (10, [])
        assert seen["right"]
        # A thread that sits in TensorStore would abort the process at its end.
        assert seen["at_storage"] == []


def test_step_that_lacks_an_object_is_passed_over(results: Callable[[str], list[Any]]) -> None:
    for result in results("usual_restores"):
        for fault in ("10/state/manifest.ocdbt", "host_state/10/marker.json"):
            seen = result[f"missing {fault}"]
            assert (seen["step"], seen["wrong"], seen["right"]) == (5, [], True)


@pytest.fixture(scope="module")
def beside_hangs(results: Callable[[str], list[Any]]) -> list[Any]:
    return results("hung_storage")


@pytest.mark.parametrize("fault", HANGS)
def test_save_returns_while_storage_hangs(beside_hangs: list[Any], fault: str) -> None:
    """No save waits for storage, whatever part of a save to it or of a removal has no answer."""
    for seen in (result[fault] for result in beside_hangs):
        assert seen["in_ram"][-8:] == list(range(5, 13)), "RAM has every step"
        assert seen["others"] == []
        assert seen["at_last"] == 13
        if fault != "removal":
            assert seen["stored"] == ([] if fault == "everything" else [2])
            assert [each["step"] for each in seen["skipped"]] == [8, 10, 12]
        assert {each["reason"] for each in seen["skipped"]} <= {
            "the previous save is still under way",
            "the previous save still waits for other processes",
        }


def test_without_the_bucket_everything_says_so(patch: pytest.MonkeyPatch) -> None:
    for seen in run("no_bucket", patch):
        assert all("bucket" in outcome for outcome in seen["outcomes"])
        assert "bucket" in seen["then"]["text"]


def test_writer_that_breaks_off_leaves_no_other_waiting(patch: pytest.MonkeyPatch) -> None:
    first, second = run("one_writer_fails", patch)
    for seen in (first, second):
        assert seen["5"] == seen["15"] == ""
        assert seen["at_storage"] == []
    assert "broken off" in second["10"]
    assert "process 1 failed" in first["10"]
    assert "broken off" in first["20"]
    assert "process 0 failed" in second["20"]
    assert "broken off" in first["20"]
    # Orbax has it wait for a folder that the first writer makes, until the deadline cancels that.
    assert second["20"]
