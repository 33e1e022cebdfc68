"""A step leaves the sight of readers in a bucket, where nothing can be renamed, and comes back."""

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
