"""What people see, on a terminal and elsewhere, and the files that it is made from."""

from __future__ import annotations

import io

import pytest
from demo_support import SLICE_LOSS, event, faulty_events, job_event
from rich.console import Console

from emergency_ckpt.core.wording import size_text
from emergency_ckpt.extras.event_log import LoggedEvent
from examples.demo.display import show


def shown(events: list[LoggedEvent], *, terminal: bool, quiet: bool = False) -> str:
    output = io.StringIO()
    environ = {"TERM": "xterm"}
    console = Console(file=output, force_terminal=terminal, width=100, height=40, _environ=environ)
    with show(console, "slice-loss", 30, quiet=quiet) as observe:
        for each in events:
            observe([each])
    return output.getvalue()


def told(*events: LoggedEvent) -> list[str]:
    lines = shown(list(events), terminal=False).splitlines()
    assert lines[0] == "== slice-loss"
    return [line.partition("] ")[2] for line in lines[1:]]


def test_plain_lines_tell_the_story_in_order_and_once() -> None:
    assert told(*faulty_events(SLICE_LOSS)) == [
        "life 0: 2 hosts start",
        "step  10  loss 9.0000",
        "step  20  loss 8.0000",
        "FAULT at step 23: hosts 1 are killed",
        "the RAM of hosts 1 is lost",
        "the launcher starts all processes again",
        "life 1: 2 hosts start",
        "restoring: collecting the inventories",
        "process 0 restored step 20 in 0.25 s: 1000 B own RAM",
        "process 1 restored step 20 in 1.25 s: 900 B peers",
        "step  30  loss 7.0000",
        "the job is done, in life 1",
    ]
    assert "\x1b" not in shown(faulty_events(SLICE_LOSS), terminal=False)


def test_terminal_gets_a_bar_that_is_redrawn() -> None:
    text = shown(faulty_events(SLICE_LOSS), terminal=True)
    assert "\x1b[" in text
    assert "step 30/30" in text
    assert "life 1" in text


def test_quiet_prints_nothing() -> None:
    assert shown(faulty_events(SLICE_LOSS), terminal=True, quiet=True) == ""


def test_late_words_of_a_dead_life_change_nothing() -> None:
    assert told(
        job_event(0, "life.started", life=1, host_of_process=[0]),
        event(1, "train.loss", life=0, step=20, loss=1.0),
    ) == ["life 1: 1 hosts start"]


def test_trouble_is_told_once_for_all_processes_that_report_it() -> None:
    reason = "process 3 refused"
    reported = [event(1, "save.incomplete", process=p, step=5, reason=reason) for p in range(4)]
    assert told(*reported, event(2, "save.incomplete", step=10, reason=reason)) == [
        "save.incomplete, step 5: process 3 refused",
        "save.incomplete, step 10: process 3 refused",
    ]


def test_unknown_events_are_ignored() -> None:
    assert not told(event(1, "save.some_new_thing", step=5), job_event(1, "job.some_new_thing"))


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (5 << 20, "5.0 MiB")]
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_timeline_panel_keeps_fault_and_recovery() -> None:
    text = shown(faulty_events(SLICE_LOSS), terminal=True)
    # A line is printed once, above the bar, so the terminal keeps it.
    assert text.count("FAULT at step 23") == 1
    assert text.count("process 1 restored step 20 in 1.25 s") == 1
