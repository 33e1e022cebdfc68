"""The commands that look, beside a real job that saves, loses a slice, and is dead in the end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from looks import eckpt, eckpt_json, tree_of
from readme_blocks import example_in

from emergency_ckpt.events import point_of
from emergency_ckpt.extras.event_log import read_events

pytestmark = pytest.mark.timeout(300)


SLOWER = (
    (r"local_save_every=10", "local_save_every=1"),
    (r"save_every=1000", "save_every=50"),
    (r"(\n +)if ckpt.reached", r"\1__import__('time').sleep(0.03)\1if ckpt.reached"),
)
"""It saves at every step and takes its time."""


def test_commands_beside_a_job_disturb_nothing_and_tell_all(ramdisk: Path) -> None:
    logs, hosts = ramdisk / "logs", ramdisk / "hosts"
    command = [sys.executable, "-m", "examples.faults", "--slices", "2"]
    command += ["--hosts-per-slice", "1", "--log-dir", logs, "--local-root", hosts, "--keep-ram"]
    command += ["--fault", "step=60 kill=slice:1 lose-ram", "--", sys.executable]
    command += [example_in(ramdisk, "plain_jax", *SLOWER)]
    listed: list[str] = []
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        while job.poll() is None:
            places = [
                word for path in sorted(hosts.glob("*")) for word in ("--local-dir", str(path))
            ]
            if not places:
                time.sleep(0.05)
                continue
            status, found = eckpt_json("ls", *places)
            # A ramdisk that the launcher wipes meanwhile is absent, which is a fault, and no more.
            assert status == (1 if found["faults"] else 0)
            assert all("is damaged" not in fault["problem"] for fault in found["faults"])
            listed += [step["state"] for step in found["steps"]]
            time.sleep(0.3)
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert "whole" in listed
    # The slice that was killed may have ended a save; after that none failed.
    failed = {"save.incomplete", "save.skipped.late", "persistent.failed"}
    last = [event for event in read_events(logs / "events").events if event.life == 1]
    assert [event for event in last if point_of(event.name, event.fields) in failed] == []

    story_of = ["ls", "--explain", logs / "events"]
    status, story = eckpt_json(*story_of)
    assert (status, story["outcome"], story["tier"]) == (0, "finished", "local")
    by_process = {each["process"]: each for each in story["processes"]}
    lost = by_process[1]
    assert lost["bytes_peer"] == sum(lost["received"].values()) > 0
    assert list(lost["received"]) == ["process/0"]
    assert by_process[0]["bytes_peer"] == 0
    assert f"step {story['step']} was restored from RAM" in eckpt(*story_of).stdout

    # The job is over: these are ramdisks of a host without its trainer.
    places = [w for path in sorted(hosts.glob("*")) for w in ("--local-dir", str(path))]
    places += ["--dir", str(ramdisk / "persistent")]
    before = tree_of(hosts, ramdisk / "persistent")
    status, found = eckpt_json("ls", *places)
    assert (status, found["faults"]) == (0, [])
    newest = found["steps"][0]
    assert (newest["step"], newest["state"], newest["processes"]) == (100, "whole", 2)
    assert {step["tier"] for step in found["steps"]} == {"local", "persistent"}
    assert [p["is_running"] for p in found["processes"]] == [False, False]
    status, checked = eckpt_json("ls", "--check", *places, "--read-data")
    assert (status, checked["faults"]) == (0, [])
    assert checked["checked"]["shards"] > 4
    status, shown = eckpt_json("ls", 100, *places)
    assert status == 0
    assert [(leaf["path"], leaf["shape"]) for leaf in shown["leaves"]] == [("w", [1024])]
    assert [state["process"] for state in shown["host_states"]] == [0, 1]
    assert tree_of(hosts, ramdisk / "persistent") == before
