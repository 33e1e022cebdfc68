"""A removed step is never half visible in a bucket, where nothing can be renamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from places import JOBS

from emergency_ckpt.testing.gcs import FakeGcs, FaultRule

PROGRAM = JOBS / "removal_program.py"
STEPS, LEFT = [10, 20, 30], [10, 30]
WAIT_S = 500.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"], process=True) as server:
        yield server


def start(gcs: FakeGcs, *program: str) -> subprocess.Popen[str]:
    # The clients read their environment when they are imported.
    environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), *program]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def run(gcs: FakeGcs, *program: str) -> Any:
    with start(gcs, *program) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def check(seen: dict[str, Any], before: dict[str, Any]) -> None:
    """The step is whole for a reader, or not there."""
    if 20 in seen["whole"]:
        assert seen == before
    for visible in (20 in seen["manager"], seen["checkpointer"]):
        if visible:
            assert seen["objects"] == before["objects"] or (
                # Its own folder is whole: of the step, only the list of finished ones has gone.
                set(before["objects"]) - set(seen["objects"]) == {"run/20/commit_success.txt"}
                and 20 not in seen["manager"]
            )
    assert seen["ours"] == seen["whole"]


def check_clean(seen: dict[str, Any]) -> None:
    assert seen["ours"] == seen["whole"] == seen["manager"] == LEFT
    assert (seen["objects"], seen["beside"], seen["checkpointer"]) == ([], [], False)


def test_removal_ending_at_any_request_shows_nothing_by_halves(gcs: FakeGcs) -> None:
    before = run(gcs, "prepare")
    assert before["ours"] == before["whole"] == before["manager"] == STEPS
    found = run(gcs, "refused")
    for seen in found:
        then, through = seen.pop("then"), seen.pop("through")
        check(seen, before)
        if 20 not in seen["whole"]:
            check_clean({**then})
        assert through == (not seen["objects"] and not seen["beside"])
    # Marker, two commit markers, what is below them, and what lies beside the step.
    assert len(found) >= 5


def test_process_killed_in_a_removal(gcs: FakeGcs) -> None:
    before = run(gcs, "prepare")
    # After marker and commit markers, when the files themselves are to go.
    gcs.add_fault(FaultRule(kind="delay", delay_s=600, method="[DP]*", skip=3))
    with start(gcs, "remove") as process:
        deadline_s = time.monotonic() + WAIT_S
        while not gcs.fault_states()[0].hit:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.kill()
    gcs.clear_faults()
    seen = run(gcs, "look")
    check(seen, before)
    assert seen["whole"] == seen["manager"] == LEFT
    assert seen["objects"]
    then = run(gcs, "clean_up")
    assert then["removed"] == [20]
    check_clean(then)


def test_set_aside_in_a_bucket_keeps_every_object(gcs: FakeGcs) -> None:
    before = run(gcs, "prepare")
    seen = run(gcs, "set_aside")
    hidden = seen["hidden"]
    assert hidden["ours"] == hidden["whole"] == hidden["manager"] == LEFT
    commits = {"commit_success.txt", "default/commit_success.txt"}
    names = {name.removeprefix("run/20/") for name in before["objects"]}
    assert {name.removeprefix("run/20/") for name in hidden["objects"]} == names - commits
    check_clean(seen["then"])
    assert set(seen["kept"]) == names - commits


@pytest.mark.parametrize("write", ["ours", "plain"])
def test_step_replaced_until_any_request_is_old_or_new(gcs: FakeGcs, write: str) -> None:
    found = run(gcs, "replaced", write)
    values = [each["values"] for each in found]
    assert values == [[20, 20, 22]] * values.count([20, 20, 22]) + [[21, 21, 22]] * values.count(
        [21, 21, 22]
    )
    # Record, copies, removals, documents, tensors, marker: before that it is the old one.
    assert values.count([20, 20, 22]) > 5
    assert values[-1] == [21, 21, 22]
    for each in found:
        assert (each["steps"], each["record"]) == ([10, 20], False)
        # What was whole is kept once, and nothing else.
        assert len(each["kept"]) == (2 if each["values"][0] == 21 else 1)
