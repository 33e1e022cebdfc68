"""What a bucket is asked does not depend on the number of steps in the directory.

By count at the server, not by time. A listing of more than 1,000 names has more pages: GCS gives no
more at once. They are counted apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from places import JOBS
from programs import eckpt_json, started

PROGRAM = JOBS / "log_costs_program.py"
STEPS = (5, 200, 2100)
WORDS = ("start", "restore", "first save", "second save", "removal", "latest_step", "stop")
MOST = {
    "start": 9,
    "restore": 10,
    "first save": 18,
    "second save": 13,
    "removal": 16,
    "latest_step": 3,
    "stop": 0,
    "ls": 4,
}
"""Requests of each word; whoever raises one of these says why."""

pytestmark = pytest.mark.timeout(600)


def counted(gcs: FakeGcs) -> tuple[list[str], int]:
    """The requests since the last call, without the further pages of listings; these, counted.

    Nor with what TensorStore asks of a step's data: it asks again for what may have changed.
    """
    records = [each for each in gcs.requests() if "/state/" not in each.path]
    gcs.clear_requests()
    pages = [each for each in records if "pageToken=" in each.path]
    kept = [f"{each.method} {each.path}" for each in records if each not in pages]
    return kept, len(pages)


def measured(gcs: FakeGcs, ramdisk: Path, steps: int) -> dict[str, tuple[int, int]]:
    """The requests of each word, and its further pages, in a directory of ``steps`` steps."""
    url = f"gs://bucket/run-{steps}"
    found: dict[str, tuple[int, int]] = {}
    with started(PROGRAM, url, ramdisk / str(steps), steps) as program:
        older = json.loads(program.line())["older"]
        names = [f"{step}/_METADATA" for step in older]
        names += [f"host_state/{step}/marker.json" for step in older]
        gcs.put_objects("bucket", {f"run-{steps}/{name}": b"{}" for name in names})
        for word in WORDS:
            gcs.clear_requests()
            program.say(word)
            said = json.loads(program.line())
            if word == "restore":
                assert said["found"] == steps
            if word == "latest_step":
                assert said["found"] == steps + 2
            requests, pages = counted(gcs)
            found[word] = len(requests), pages
        program.communicate()
    assert program.returncode == 0
    gcs.clear_requests()
    status, listed = eckpt_json("ls", "--dir", url)
    assert (status, len(listed["steps"])) == (0, steps + 1)
    requests, pages = counted(gcs)
    found["ls"] = len(requests), pages
    return found


def test_requests_are_the_same_for_any_number_of_steps(gcs: FakeGcs, ramdisk: Path) -> None:
    found = {steps: measured(gcs, ramdisk, steps) for steps in STEPS}
    for word in (*WORDS, "ls"):
        if word != "stop":
            assert {each[word][0] for each in found.values()} == {found[5][word][0]}, word
            assert found[5][word][0] <= MOST[word], word
    # One listing of the directory, and for the first save also one of what lies beside.
    assert {word: pages for word, (_, pages) in found[200].items() if pages} == {}
    assert found[2100]["restore"][1] == 2100 // 1000
