"""A step leaves the sight of readers in a bucket, where nothing can be renamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from places import JOBS
from programs import printed

PROGRAM = JOBS / "removal_program.py"
WAIT_S = 500.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("gcs")]


def run(*program: str) -> Any:
    return json.loads(printed(PROGRAM, *program, timeout_s=WAIT_S).splitlines()[-1])


COMMITS = {"commit_success.txt", "state/commit_success.txt"}


def test_hidden_step_in_a_bucket_loses_its_commits_alone() -> None:
    seen = run("hidden")
    names = set(seen["before"]["objects"])
    hidden = seen["hidden"]
    assert hidden["ours"] == hidden["whole"] == hidden["manager"] == [10]
    assert (hidden["checkpointer"], hidden["value"]) == (False, 20), "it is served by its number"
    assert hidden["folder"] == "20"
    assert set(hidden["objects"]) == names - COMMITS
    room = seen["room"]
    assert (room["objects"], room["beside"], room["ours"]) == ([], [], [10])
    again = seen["again"]
    assert again["ours"] == again["whole"] == again["manager"] == [10, 20]
    assert again["value"] == 21, "before the log lists it"


def test_hidden_step_does_not_return_where_the_log_is_lost() -> None:
    seen = run("hidden_without_a_log")
    assert seen["whole"] == seen["manager"] == [10], "a restore names the other and passes it over"
    assert "marker.json" in seen["beside"], "nothing of it was removed"


def test_step_of_several_items_is_hidden_and_removed_whole() -> None:
    saved, hidden, removed = run("several_items")
    commits = {"commit_success.txt"} | {
        f"{item}/commit_success.txt" for item in ("params", "opt", "metrics")
    }
    assert commits < set(saved["objects"])
    assert set(hidden["objects"]) == set(saved["objects"]) - commits
    assert (hidden["whole"], hidden["manager"]) == ([10], [10])
    assert hidden["leaves"] == ["opt", "params/w"]
    assert "by incarnation" in hidden["other"], "as the other step's writer wrote it"
    assert (removed["objects"], removed["beside"], removed["manager"]) == ([], [], [10])


def test_late_claim_of_an_earlier_life_is_in_the_way_of_no_save() -> None:
    seen = run("late_claims")
    assert seen["ours"] == seen["whole"] == [10, 20]
    assert seen["value"] == 21
    assert seen["theirs"] == ["_CHECKPOINT_METADATA"], "its save may be under way"


def test_removal_leaves_a_step_that_orbax_has_written_again() -> None:
    for seen in run("replaced"):
        assert seen["same"], "no object of it was removed"
        assert seen["manager"] == [10, 20]


def test_removal_of_a_plain_step_goes_on_in_the_next_life() -> None:
    left, removed = run("plain_removal_in_two_lives")
    assert left["objects"]
    assert left["manager"] == left["ours"] == [10]
    assert (removed["objects"], removed["manager"], removed["ours"]) == ([], [10], [10])


def test_clean_up_after_a_failed_save_leaves_what_others_wrote() -> None:
    for program, seen in run("failed_saves_beside_others").items():
        ours = set(seen["failed"]) - set(seen["theirs"])
        assert "process_00000_of_00001.json" in ours
        assert ("_CHECKPOINT_METADATA" in ours) == (program == "user")
        assert seen["same life"] == seen["next life"] == seen["theirs"], program
        assert seen["saved"] == ["21"], "the place can be saved anew"
