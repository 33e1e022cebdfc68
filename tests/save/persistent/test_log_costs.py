"""What a bucket is asked does not depend on the number of steps in the directory.

By count at the server, not by time. A listing of more than 1,000 names has more pages: GCS gives no
more at once. They are counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from looks import eckpt_json
from places import JOBS

PROGRAM = JOBS / "log_costs_program.py"
STEPS = (5, 200, 5000)
WORDS = ("start", "restore", "first save", "second save", "removal", "latest_step", "stop")

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
    command = [sys.executable, str(PROGRAM), url, str(ramdisk / str(steps)), str(steps)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found: dict[str, tuple[int, int]] = {}
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()  # the directory is filled
        for word in WORDS:
            gcs.clear_requests()
            program.stdin.write(f"{word}\n")
            program.stdin.flush()
            said = json.loads(program.stdout.readline())
            if word == "restore":
                assert said["found"] == steps
            if word == "latest_step":
                assert said["found"] == steps + 2
            requests, pages = counted(gcs)
            found[word] = len(requests), pages
        program.stdin.close()
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
    # One listing of the directory, and for the first save also one of what lies beside.
    assert {word: pages for word, (_, pages) in found[200].items() if pages} == {}
    assert found[5000]["restore"][1] == 5000 // 1000
