"""The trace of a run for Perfetto and TensorBoard, and its figures as lines of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from looks import eckpt_here
from run_log_support import failed_run, logged, write_log

from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.figures import summary_lines
from emergency_ckpt.tools.report.spans import trace_of

HOSTILE = "\x1b[31m</script>\n" + "x" * 10_000


def entries(events: list[LoggedEvent], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in trace_of(events)["traceEvents"] if entry["ph"] == kind]


def test_trace_has_a_process_for_each_and_spans_in_microseconds() -> None:
    names = [entry for entry in entries(failed_run(), "M") if entry["name"] == "process_name"]
    assert [(entry["pid"], entry["args"]["name"]) for entry in names] == [
        (1, "process 0, slice 0"),
        (2, "process 1, slice 1"),
    ]
    spans = entries(failed_run(), "X")
    _, restore = [span for span in spans if span["name"] == "restore" and span["pid"] == 1]
    assert (restore["ts"], restore["dur"]) == (54_000_000, 3_250_000)
    assert restore["args"] == {"step": 20}
    (planning,) = [span for span in spans if span["name"] == "planning" and span["pid"] == 1]
    assert planning["tid"] != restore["tid"]


def test_trace_shows_marks_and_the_step_of_each_process() -> None:
    failed = logged(1040, "persistent.failed", 1, step=20, reason="bucket is gone")
    job = msgspec.structs.replace(logged(1034, "fault.fired", step=23), process=None)
    events = [*failed_run(), failed, job]
    marks = {entry["name"]: entry for entry in entries(events, "i")}
    assert marks["persistent.failed"]["args"] == {"text": "reason bucket is gone", "step": 20}
    assert (marks["fault.fired"]["pid"], marks["persistent.failed"]["pid"]) == (0, 2)
    steps = [entry for entry in entries(events, "C") if entry["pid"] == 1]
    assert [entry["args"]["step"] for entry in steps][-2:] == [29, 30]


def test_trace_of_a_hostile_log_is_bounded_json() -> None:
    fields = {"reason": HOSTILE, "step": 5, "holder": HOSTILE}
    text = json.dumps(trace_of([*failed_run(), logged(1040, "save.incomplete", 1, **fields)]))
    assert "\\u001b[31m" not in text
    assert len(text) < 200_000


def test_summary_has_the_figures_of_the_page() -> None:
    lines = summary_lines(failed_run())
    when = "1970-01-01 00:16:40 to 1970-01-01 00:17:47 UTC"
    assert lines[0].startswith(f"2 processes, 2 lives, {when}, ")
    figures = dict(line.split(": ", 1) for line in lines[1:8])
    assert figures["goodput"] == "44.3%"
    assert figures["steps lost, all"] == "3"
    assert "life 1: back to step 20 from RAM after step 23, 3 steps lost" in "\n".join(lines)


def test_summary_says_how_many_recoveries_are_left_out() -> None:
    events = [
        event
        for life in range(103)
        for event in (
            logged(1000 + 10 * life, "restore.stage", life=life, stage="started"),
            logged(1001 + 10 * life, "train.step", life=life, step=life + 1),
        )
    ]
    lines = summary_lines(events)
    assert "recoveries: 102" in lines
    at = lines.index("2 older recoveries are left out")
    assert lines[at + 1].startswith("life 3: ")
    assert len([line for line in lines if line.startswith("life ")]) == 100
    assert not any("left out" in line for line in summary_lines(failed_run()))


def test_report_command_prints_figures_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "log", failed_run())
    out, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert eckpt_here("report", log, "-o", out, "--trace", trace) == 0
    assert "goodput: 44.3%" in capsys.readouterr().out
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ms"
    assert out.exists()
