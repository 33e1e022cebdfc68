"""Every fault of storage, on a save and on a restore: training goes on, nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from storage_faults_job import RESTORE_FAULTS, SAVE_FAULTS
from support import job_root, run_life, spec_of

from emergency_ckpt.testing.gcs import FakeGcs

PASSING_SAVES = {
    "overloaded",
    "unavailable",
    "reset",
    "slow",
    "lost_reply",
    "marker_precondition",
}
FAILING_SAVES = {"down", "stalled", "denied", "beside_denied", "marker_denied"}
OLDER_STEP = {"data_down", "stalled", "trickling"}
NO_STEP = {"denied", "down"}


def run(program: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with FakeGcs(buckets=["bucket"], process=True) as gcs, job_root() as root:
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
def saves(patch: pytest.MonkeyPatch) -> list[Any]:
    return run("saves", patch)


@pytest.fixture(scope="module")
def restores(patch: pytest.MonkeyPatch) -> list[Any]:
    return run("restores", patch)


@pytest.mark.parametrize("fault", sorted(SAVE_FAULTS))
def test_a_save_under_a_fault(saves: list[Any], fault: str) -> None:
    for seen in (result[fault] for result in saves):
        before, during, after = seen["outcomes"]
        assert (before, after) == ("", ""), "the saves before and after are whole"
        assert (seen["then"]["step"], seen["then"]["wrong"]) == (15, [])
        if fault in PASSING_SAVES:
            assert during == ""
        if fault in FAILING_SAVES:
            assert "step 10 to the persistent tier" in during
            assert "the next persistent save tries again" in during
            assert seen["failed"] == [10]
        if during == "":  # then it must be good
            assert (seen["step_10"]["step"], seen["step_10"]["wrong"]) == (10, [])


@pytest.mark.parametrize("fault", sorted(RESTORE_FAULTS))
def test_a_restore_under_a_fault(restores: list[Any], fault: str) -> None:
    for process, seen in enumerate(result[fault] for result in restores):
        if fault in NO_STEP:
            assert seen["error"] == ("RestoreFailed" if process else "PersistentTierError")
            hint = "credentials" if fault == "denied" else "reachable"
            assert hint in seen["text"]
            continue
        assert (seen["step"], seen["wrong"]) == (5 if fault in OLDER_STEP else 10, [])
        assert seen["right"]


def test_a_step_that_lacks_an_object_is_passed_over(restores: list[Any]) -> None:
    for result in restores:
        for fault in ("10/default/manifest.ocdbt", "host_state/10/marker.json"):
            seen = result[f"missing {fault}"]
            assert (seen["step"], seen["wrong"], seen["right"]) == (5, [], True)


def test_without_the_bucket_everything_says_so(patch: pytest.MonkeyPatch) -> None:
    for seen in run("no_bucket", patch):
        assert all("bucket" in outcome for outcome in seen["outcomes"])
        assert "bucket" in seen["then"]["text"]
