"""The forks that stand for programs of ``tests/jobs`` are processes as the launcher starts them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import warm_start
from launch_support import ProcessSet
from running_jobs import spec_of

TIMEOUT_S = 60
ENDS = {"3": 3, "0": 0, "raise": 1, "kill": -signal.SIGKILL}


def told(root: Path, end: str) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    spec = spec_of(root, "place_program.py", end, hosts=1, devices=3)
    spec = dataclasses.replace(spec, env={"ECKPT_TEST_WORD": "a word"})
    with ProcessSet(spec) as processes:
        pids = processes.pids
        exits = processes.wait(TIMEOUT_S)
    logs = [spec.log_path(0, index).read_text() for index in range(2)]
    found = [json.loads(log.splitlines()[0]) for log in logs]
    assert [each["pid"] for each in found] == list(pids)
    return found, [each.returncode for each in exits], logs


@pytest.mark.parametrize("end", ENDS)
def test_fork_ends_as_the_program_does(ramdisk: Path, end: str) -> None:
    _, statuses, logs = told(ramdisk, end)
    assert statuses == [ENDS[end]] * 2
    assert all(("KeyError: 'nobody'" in log) == (end == "raise") for log in logs)


@pytest.mark.parametrize("cold", [False, True], ids=["fork", "interpreter"])
def test_both_kinds_of_start_give_the_same_process(
    ramdisk: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    if cold:
        monkeypatch.setattr(warm_start, "JOBS", Path("/nowhere"))
    found, _, _ = told(ramdisk, "0")
    for each in found:
        assert each["parent"] == os.getpid()
        assert each["session"] == each["group"] == each["pid"]
        assert each["input"] == os.devnull
        assert each["descriptors"] == [0, 1, 2]
        assert each["word"] == "a word"
        assert each["slices"] == "2"
        assert each["devices"] == 3
        assert each["least_s"] == 0.1
        assert each["cache"].startswith(str(ramdisk))
    first, second = found
    assert first["hash"] != second["hash"]


def test_fork_is_killed_with_its_job(ramdisk: Path) -> None:
    spec = spec_of(ramdisk, "place_program.py", "wait", hosts=1)
    with ProcessSet(spec) as processes:
        pids = processes.pids
        names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2] for pid in pids]
        processes.end(grace_s=0)
    assert names == [os.fsencode(warm_start.__file__)] * 2
    assert [each.returncode for each in processes.exits] == [-signal.SIGKILL] * 2
