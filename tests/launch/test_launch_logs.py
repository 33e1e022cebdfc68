"""Logs: what is shown of them, also where nobody reads it, and directories that go at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import DEADLINE_S, wait_until
from looks import eckpt_here
from places import JOBS
from programs import started

from emergency_ckpt.extras.event_log import read_events
from emergency_ckpt.tools.cli.output import Printer
from emergency_ckpt.tools.launch.job import LogFollower

# More than a pipe holds, so that whoever prints it waits for a reader.
MANY_LINES = "seq 1 100000"


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.process  # by the name of a command
def test_launch_logs_stay_after_a_failure_only(
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = ["/bin/sh", "-c", f"echo said; exit {status}"]
    options = ["--slices", "1", "--hosts-per-slice", "1", "--max-restarts", "0"]
    assert eckpt_here("launch", *options, "--", *program) == status
    logs = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")]
    kept = ["events_launcher.jsonl", "process_00000.log"] if status else []
    assert sorted(path.name for path in logs) == kept
    assert re.search(r"life\.ended .*seconds=\d+\.\d", capfd.readouterr().err)


def launched(program: str, tmp_path: Path) -> tuple[object, ...]:
    places = ("--local-root", tmp_path / "ram", "--log-dir", tmp_path / "logs")
    shape = ("--slices", 1, "--hosts-per-slice", 1, "--max-restarts", 0)
    return (JOBS / "eckpt_program.py", "launch", *shape, *places, "--", "/bin/sh", "-c", program)


def has_ended(tmp_path: Path) -> bool:
    events = tmp_path / "logs" / "events"
    names = [event.name for event in read_events(events).events] if events.exists() else []
    return "job.finished" in names or "job.failed" in names


def test_job_whose_output_nobody_reads_is_still_watched(tmp_path: Path) -> None:
    """As in ``eckpt launch ... | less``, or after Ctrl-S."""
    with started(*launched(f"{MANY_LINES}; exit 3", tmp_path)) as launcher:
        wait_until(lambda: has_ended(tmp_path), "the death is seen")
        assert launcher.wait(DEADLINE_S) == 3


def test_output_that_is_read_late_is_whole(tmp_path: Path) -> None:
    with started(*launched(f"{MANY_LINES}; printf last", tmp_path)) as launcher:
        wait_until(lambda: has_ended(tmp_path), "the job is over")
        lines = launcher.stdout.read().splitlines()
        assert launcher.wait(DEADLINE_S) == 0
    assert lines == [f"[0.0] {line}" for line in [*range(1, 100001), "last"]]


@pytest.mark.parametrize("streams", ["stdout", "both"])
@pytest.mark.parametrize("status", [0, 3])
def test_full_disk_under_the_output_ends_no_job(streams: str, status: int, tmp_path: Path) -> None:
    """As in ``eckpt launch ... > out`` and ``> out 2>&1``. The exit status is the job's."""
    words = [sys.executable, *map(str, launched(f"seq 1 3; exit {status}", tmp_path))]
    with open("/dev/full", "w") as full:
        errors = subprocess.PIPE if streams == "stdout" else full
        done = subprocess.run(
            words, stdout=full, stderr=errors, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == status
    assert has_ended(tmp_path)
    if streams == "stdout":
        assert done.stderr.count("No space left on device") == 1
        assert "life.ended" in done.stderr
        assert f"logs are kept in {tmp_path / 'logs'}" in done.stderr


def test_lines_that_nobody_reads_in_time_are_counted() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as shown, os.fdopen(writer, "w") as stream:
        with Printer(limit_chars=1000, end_s=DEADLINE_S) as printer:
            for number in range(100_000):
                printer.pass_on(f"{number:09}", stream)
            found = [shown.readline().rstrip("\n")]
            while found[-1] != "000099999":
                found.append(shown.readline().rstrip("\n"))
        assert not printer.has_printed_all
    notes = [line for line in found if "left out" in line]
    counts = [int(re.findall(r"\d+", note)[0]) for note in notes]
    assert sum(counts) + len(found) - len(notes) == 100_000


def test_one_look_at_a_log_takes_a_part_of_it(tmp_path: Path) -> None:
    """Else a process that prints as fast as its lines are shown would keep the launcher from it."""
    log = tmp_path / "log"
    log.write_text("a line\n" * 200_000 + "last")
    lines: list[str] = []
    follower = LogFollower(log, "> ", lines.append)
    follower.poll()
    assert 0 < len(lines) < 200_000
    follower.close()
    assert lines == ["> a line"] * 200_000 + ["> last"]
