"""What people see, on a terminal and elsewhere, and the files that it is made from."""

from __future__ import annotations

import io

import pytest
from demo_support import SLICE_LOSS, event, faulty_events, job_event
from rich.console import Console

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.event_log import LoggedEvent
from emergency_ckpt.tools.demo.display import KEPT_MESSAGES, RunTimeline, render, show


def shown(events: list[LoggedEvent], *, terminal: bool, quiet: bool = False) -> str:
    output = io.StringIO()
    environ = {"TERM": "xterm"}
    console = Console(file=output, force_terminal=terminal, width=100, height=40, _environ=environ)
    with show(RunTimeline("slice-loss", 30), console, quiet=quiet) as observe:
        for each in events:
            observe([each])
    return output.getvalue()


def test_plain_lines_tell_the_story_in_order_and_once() -> None:
    lines = shown(faulty_events(SLICE_LOSS), terminal=False).splitlines()
    assert lines[0] == "== slice-loss"
    told = [line.partition("] ")[2] for line in lines[1:]]
    assert told == [
        "life 0: 2 hosts start",
        "step  10  loss 9.0000",
        "step  20  loss 8.0000",
        "FAULT at step 23: hosts 1 are killed",
        "the RAM of hosts 1 is lost",
        "the launcher starts all processes again",
        "life 1: 2 hosts start",
        "restoring: collecting the inventories",
        "process 0 restored step 20 in 0.25 s: 1000 B own RAM",
        "process 1 restored step 20 in 1.25 s (the prefetch saved 0.50 s): 900 B peers",
        "step  30  loss 7.0000",
        "the job is done, in life 1",
    ]
    assert not any("\x1b" in line for line in lines)


def test_terminal_gets_a_picture_that_is_redrawn() -> None:
    text = shown(faulty_events(SLICE_LOSS), terminal=True)
    assert "\x1b[" in text
    assert "step 30/30" in text
    assert "life 1" in text


def test_quiet_prints_nothing() -> None:
    assert shown(faulty_events(SLICE_LOSS), terminal=True, quiet=True) == ""


def picture(timeline: RunTimeline) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(render(timeline))
    return output.getvalue()


def test_picture_shows_every_process_as_last_heard_of() -> None:
    timeline = RunTimeline("host-loss", 30)
    for each in faulty_events(SLICE_LOSS):
        timeline.observe(each)
        if each.name == "process.exited":
            assert "dead" in picture(timeline)
            assert timeline.processes[1].saved_step == 20
    assert timeline.step == 30
    assert [view.step for view in timeline.processes.values()] == [30, 30]
    assert "dead" not in picture(timeline)


def test_late_words_of_a_dead_life_change_nothing() -> None:
    timeline = RunTimeline("", 30)
    timeline.observe(job_event(0, "life.started", life=1, host_of_process=[0]))
    timeline.observe(event(1, "train.step", life=0, step=23, loss=1.0))
    assert timeline.step == 0
    assert timeline.processes == {}


def test_trouble_is_told_once_for_all_processes_that_report_it() -> None:
    timeline = RunTimeline("", 30)
    for process in range(4):
        each = event(1, "save.incomplete", process=process, step=5, reason="process 3 refused")
        timeline.observe(each)
    timeline.observe(event(2, "save.incomplete", step=10, reason="process 3 refused"))
    assert [message.text for message in timeline.take_messages()] == [
        "save.incomplete, step 5: process 3 refused",
        "save.incomplete, step 10: process 3 refused",
    ]
    assert timeline.take_messages() == []


def test_unknown_events_are_ignored() -> None:
    timeline = RunTimeline("", 30)
    timeline.observe(event(1, "save.some_new_thing", step=5))
    timeline.observe(job_event(1, "job.some_new_thing"))
    assert timeline.take_messages() == []


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (5 << 20, "5.0 MiB")]
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_timeline_panel_keeps_fault_and_recovery() -> None:
    timeline = RunTimeline("slice-loss", 200)
    fields = {"step": 3, "hosts": [2, 3]}
    timeline.observe(LoggedEvent(time_s=1.0, name="fault.fired", life=0, fields=fields))
    for step in range(10, 10 * (3 * KEPT_MESSAGES), 10):
        fields = {"step": step, "loss": 0.5}
        event = LoggedEvent(time_s=1.0 + step, name="train.step", life=0, process=0, fields=fields)
        timeline.observe(event)
    shown = timeline.shown()
    assert shown[0].text.startswith("FAULT at step 3")
    assert shown[-1].text.startswith(f"step {step}")
    assert len(shown) == KEPT_MESSAGES
