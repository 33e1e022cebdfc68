"""Events of a made-up run: two processes, steps of one second, a failure at step 23."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.cli.ls.explain import RestoreExplanation, last_restore
from emergency_ckpt.tools.report.lives import ReportRun, read_log
from emergency_ckpt.tools.report.page import page_of

__all__ = ["RestoreExplanation", "last_restore", "read_log"]


def logged(time_s: float, name: str, process: int = 0, life: int = 0, **fields: Any) -> LoggedEvent:
    return LoggedEvent(
        time_s=time_s,
        name=name,
        process=process,
        slice=process,
        run_id="run7",
        incarnation=f"{life:06d}-ab",
        life=life,
        fields=fields,
    )


def restored_at(time_s: float, process: int, step: int = 20, **fields: Any) -> LoggedEvent:
    moved = {"bytes_local": 0, "bytes_peer": 0, "bytes_persistent": 0}
    known = {"step": step, "tier": "local", "seconds": 0.5}
    return logged(time_s, "restore.finished", process, 1, **(known | moved | fields))


def saved(time_s: float, process: int, life: int, step: int) -> list[LoggedEvent]:
    return [
        logged(time_s, "save.started", process, life, step=step, tier="local"),
        logged(time_s + 0.5, "save.complete", process, life, step=step, seconds=0.5),
    ]


def failed_run(*, every_step: bool = True) -> list[LoggedEvent]:
    """Return a start of 10 s, steps 1 to 23, and 24.25 s later steps 21 to 30 from step 20 on."""
    events: list[LoggedEvent] = []
    for process in (0, 1):
        events += [
            logged(1000, "start.link", process, platform="gpu"),
            logged(1001, "restore.stage", process, stage="started"),
            logged(1010, "restore.nothing", process),
            logged(1053, "start.link", process, 1, platform="gpu"),
            logged(1054, "restore.stage", process, 1, stage="started"),
            logged(1055, "restore.stage", process, 1, stage="planned", step=20, tier="local"),
            restored_at(1057.25, process),
        ]
        for life, first, last, at_s in ((0, 1, 23, 1010), (1, 21, 30, 1057.25)):
            for step in range(first, last + 1):
                time_s = at_s + step - first + 1
                if every_step:
                    events.append(logged(time_s, "train.step", process, life, step=step))
                if step % 5 == 0:
                    events += saved(time_s, process, life, step)
    return sorted(events, key=lambda event: event.time_s)


def run_without_restores(*, second_from: int = 0) -> list[LoggedEvent]:
    """Return a start of 10 s, steps 0 to 8, and 17 s later 8 steps of a life that restores none."""
    events: list[LoggedEvent] = []
    for life, begin_s, first, count in ((0, 1000, 0, 9), (1, 1025, second_from, 8)):
        start = logged(begin_s, "start.link", life=life, platform="gpu")
        events.append(msgspec.structs.replace(start, incarnation=""))
        events += [
            logged(begin_s + 10 + i, "train.step", life=life, step=first + i) for i in range(count)
        ]
        events += saved(events[-1].time_s, 0, life, first + count - 1)
    return events


def line_of(event: LoggedEvent, run_id: str = "run7") -> str:
    document = {
        "time_s": event.time_s,
        "name": event.name,
        "process": event.process,
        "slice": event.slice,
        "run_id": run_id,
        "incarnation": event.incarnation,
        "fields": event.fields,
    }
    return json.dumps(document) + "\n"


def write_log(directory: Path, events: Iterable[LoggedEvent]) -> Path:
    """Write the events as the processes of a job do; return ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for event in events:
        with (directory / f"events_{event.process:05d}.jsonl").open("a") as file:
            file.write(line_of(event))
    return directory


def report_page(events: list[LoggedEvent], **changes: Any) -> str:
    """Return the page that ``eckpt report`` makes of a run with these events."""
    return page_of("Report", [ReportRun(title="run7", events=events, **changes)])
