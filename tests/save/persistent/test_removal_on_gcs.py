"""A removed step is never half visible in a bucket, where nothing can be renamed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fake_gcs import FakeGcs, FaultRule
from places import JOBS
from programs import printed, started

PROGRAM = JOBS / "removal_program.py"
STEPS, LEFT = [10, 20, 30], [10, 30]
WAIT_S = 500.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("gcs")]


def run(*program: str) -> Any:
    return json.loads(printed(PROGRAM, *program, timeout_s=WAIT_S).splitlines()[-1])


def check(seen: dict[str, Any], before: dict[str, Any]) -> None:
    """The step is whole for a reader, or not there."""
    if 20 in seen["whole"]:
        assert seen == before
    for visible in (20 in seen["manager"], seen["checkpointer"]):
        if visible:
            assert seen["objects"] == before["objects"] or (
                # Its own folder is whole: of the step, only the list of finished ones has gone.
                set(before["objects"]) - set(seen["objects"]) == {"commit_success.txt"}
                and 20 not in seen["manager"]
            )
    assert seen["ours"] == seen["whole"]


def check_clean(seen: dict[str, Any]) -> None:
    assert seen["ours"] == seen["whole"] == seen["manager"] == LEFT
    assert (seen["objects"], seen["beside"], seen["checkpointer"]) == ([], [], False)


def test_removal_ending_at_any_request_shows_nothing_by_halves() -> None:
    before = run("prepare")
    assert before["ours"] == before["whole"] == before["manager"] == STEPS
    found = run("refused")
    for seen in found:
        then, error = seen.pop("then"), seen.pop("error")
        check(seen, before)
        removed = then.pop("removed")
        if 20 in seen["whole"]:
            assert (then, removed) == (before, [])
        else:
            check_clean(then)
        assert error or (seen["objects"], seen["beside"], removed) == ([], [], [])
    # Claim, announcement, two commit markers, what is below them, what lies beside, the end.
    assert len(found) >= 7
    assert 20 in found[1]["whole"], "the claim alone removes nothing"


def test_process_killed_in_a_removal(gcs: FakeGcs) -> None:
    before = run("prepare")
    # After claim, announcement and commit markers, when the files themselves are to go.
    gcs.add_fault(FaultRule(kind="delay", delay_s=600, method="[DP]*", skip=4))
    with started(PROGRAM, "remove") as process:
        deadline_s = time.monotonic() + WAIT_S
        while not gcs.fault_states()[0].hit:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    gcs.clear_faults()
    seen = run("look")
    check(seen, before)
    assert seen["whole"] == seen["manager"] == LEFT
    assert seen["objects"]
    then = run("clean_up")
    assert then["removed"] == [20]
    check_clean(then)


COMMITS = {"commit_success.txt", "state/commit_success.txt"}


def test_step_set_aside_in_a_bucket_keeps_every_object() -> None:
    seen = run("set_aside")
    names = set(seen["before"]["objects"])
    hidden, then = seen["hidden"], seen["then"]
    for each in (hidden, then):
        assert each["ours"] == each["whole"] == each["manager"] == [10]
        assert (each["checkpointer"], each["value"]) == (False, 20), "it is served by its number"
    assert set(hidden["objects"]) == names - COMMITS
    assert (then["objects"], then["beside"]) == ([], [])
    assert set(seen["kept"]) == names - COMMITS
    again = seen["again"]
    assert again["ours"] == again["whole"] == again["manager"] == [10, 20]
    assert again["value"] == 21, "before the log lists it"


def test_step_of_several_items_leaves_and_returns_whole() -> None:
    saved, aside, back, removed = run("several_items")
    commits = {"commit_success.txt"} | {
        f"{item}/commit_success.txt" for item in ("params", "opt", "metrics")
    }
    assert commits < set(saved["objects"])
    assert set(aside["objects"]) == set(saved["objects"]) - commits
    assert (aside["whole"], aside["manager"]) == ([10], [10])
    assert back["objects"] == saved["objects"]
    assert (back["whole"], back["manager"]) == ([10, 20], [10, 20])
    assert back["leaves"] == ["opt", "params/w"]
    assert "by incarnation" in back["other"], "as the other step's writer wrote it"
    assert (removed["objects"], removed["beside"], removed["manager"]) == ([], [], [10])


def test_rollback_ending_at_any_request_keeps_or_hides_a_step() -> None:
    """It counts, or is aside: from the version that says so on, whatever comes after it."""
    found = run("rolled_back")
    # Claim, chain, two commit markers, the end.
    assert len(found) >= 5
    counted = [seen["whole"] for seen in found]
    assert counted == [[10, 20]] * counted.count([10, 20]) + [[10]] * counted.count([10])
    assert counted[0] == [10, 20]
    for seen in found:
        then = seen["then"]
        assert seen["value"] == then["value"] == 20, "it is served by its number"
        assert seen["ours"] == seen["whole"] == then["ours"] == then["whole"]
        assert seen["beside"] == then["beside"] == found[0]["beside"]
        assert set(then["objects"]) >= set(found[0]["objects"]) - COMMITS
        assert then["manager"] == then["whole"]
        assert 20 in seen["manager"] or 20 not in seen["whole"]


@pytest.mark.parametrize("write", ["ours", "plain"])
def test_step_replaced_until_any_request_is_old_or_new(write: str) -> None:
    found = run("replaced", write)
    values = [each["values"] for each in found]
    assert values == [[20, 20, 22]] * values.count([20, 20, 22]) + [[21, 21, 22]] * values.count(
        [21, 21, 22]
    )
    # Claim, copies, removals, documents, tensors, marker: before the version it is the old one.
    assert values.count([20, 20, 22]) > 5
    assert values[-1] == [21, 21, 22]
    for each in found:
        assert (each["steps"], each["unsettled"]) == ([10, 20], [])
        # What was whole is kept once, and nothing else: also of a save without its version.
        assert len(each["kept"]) == (2 if each["marked"] else 1)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("first save", [[30, 30]]),
        ("save", [[10, 10], [20, 20], [30, 30]]),
        ("save again", [[10, 10], [20, 21]]),
        ("removal", [[10, 10]]),
        ("rollback", [[10, 10]]),
    ],
)
def test_lost_reply_to_any_change_changes_nothing(what: str, values: Any) -> None:
    """It is asked again, and finds what it did the first time."""
    found = run("unheard", what)
    assert len(found) > 4
    for seen in found:
        assert (seen["error"], seen["values"]) == ("", values)
        assert seen["plain"] == seen["then"] == [step for step, _ in values]
