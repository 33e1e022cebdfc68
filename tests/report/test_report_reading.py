"""Reading of event logs that are damaged, foreign or hostile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_log_support import failed_run, line_of, logged, read_log, write_log

from emergency_ckpt.errors import CheckpointError


def test_read_log_of_a_job_gives_its_events(tmp_path: Path) -> None:
    events = failed_run()
    found = read_log(write_log(tmp_path, events))
    key = lambda event: (event.time_s, event.process, event.name)  # noqa: E731
    assert sorted(found.events, key=key) == sorted(events, key=key)
    assert found.title == "Run run7"
    assert found.warnings == []


@pytest.mark.parametrize("name", ["", "notes.txt"])
def test_read_log_without_files_fails(tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"no file events_\*.jsonl is there"):
        read_log(tmp_path)


def test_read_log_without_events_fails(tmp_path: Path) -> None:
    (tmp_path / "events_00000.jsonl").write_text("\n{}\n")
    with pytest.raises(CheckpointError, match=r"no event is in it\. 1 line is no event"):
        read_log(tmp_path)


def test_read_log_damaged_lines_are_counted_and_named(tmp_path: Path) -> None:
    write_log(tmp_path, failed_run())
    path = tmp_path / "events_00000.jsonl"
    size_bytes = path.stat().st_size
    junk = [b"{", b"[]", b"\xff\xfe", b"[" * 60_000]
    path.write_bytes(path.read_bytes() + b"\n".join(junk) + b"\n\n{")
    found = read_log(tmp_path)
    assert len(found.events) == len(failed_run())
    (warning,) = found.warnings
    assert warning.startswith("5 lines are no event and left out: events_00000.jsonl at byte")
    positions = [int(each) for each in re.findall(r"events_00000.jsonl at byte (\d+):", warning)]
    assert positions == [size_bytes + past for past in (0, 2, 5, 8, 60_010)]
    assert warning.endswith(": half a line.")


def test_read_log_names_few_of_many_damaged_lines(tmp_path: Path) -> None:
    write_log(tmp_path, failed_run()[:1])
    (tmp_path / "events_00009.jsonl").write_text("no\n" * 500)
    (warning,) = read_log(tmp_path).warnings
    assert warning.startswith("500 lines are no event")
    assert warning.endswith("; and 480 more.")


def test_read_log_of_two_runs_says_so(tmp_path: Path) -> None:
    log = write_log(tmp_path, failed_run()[:1])
    with (log / "events_00000.jsonl").open("a") as file:
        file.write(line_of(failed_run()[1], run_id="run8"))
        file.write(line_of(logged(5, "log.lost", count=3), run_id=""))
    found = read_log(log)
    assert found.title == "Run run7, run8"
    assert found.warnings == [
        "The log itself lost events, 1 time (log.lost).",
        "The log has events of several runs, which are shown as one.",
    ]
