"""A run as trace events, for Perfetto (ui.perfetto.dev) and TensorBoard's trace viewer.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.event_fields import whole
from emergency_ckpt.tools.report.spans import KINDS, Mark, Span, marks_of, spans_of

JOB = 0
"""The row of what no process has reported; process p has the row p + 1."""
_ROWS = {kind: row for row, kind in enumerate(KINDS, start=1)}


def trace_of(events: Sequence[LoggedEvent]) -> dict[str, Any]:
    """Return the trace of events that are numbered by life; its times begin with the first one."""
    begin_s = min(event.time_s for event in events)
    slices = {event.process: event.slice for event in events if event.process is not None}
    names = {JOB: "job"} if any(event.process is None for event in events) else {}
    for process, slice_index in sorted(slices.items()):
        of_slice = "" if slice_index is None else f", slice {slice_index}"
        names[process + 1] = f"process {process}{of_slice}"
    entries = [_named(pid, 0, "process_name", name) for pid, name in names.items()]
    spans = spans_of(events)
    rows = sorted({(_pid(span.process), span.kind) for span in spans})
    entries += [_named(pid, _ROWS[kind], "thread_name", kind) for pid, kind in rows]
    entries += [_of_span(span, begin_s) for span in spans]
    entries += [_of_mark(mark, begin_s) for mark in marks_of(events)]
    entries += [
        {
            **{"ph": "C", "name": "step", "pid": _pid(event.process)},
            **{"ts": _us(event.time_s - begin_s), "args": {"step": whole(event, "step")}},
        }
        for event in events
        if event.name == "train.step"
    ]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _named(pid: int, tid: int, name: str, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": value}}


def _of_span(span: Span, begin_s: float) -> dict[str, Any]:
    args = {"step": span.step, "its end is not in the log": span.unfinished or None}
    return {
        "ph": "X",
        "name": span.kind,
        "pid": _pid(span.process),
        "tid": _ROWS[span.kind],
        "ts": _us(span.begin_s - begin_s),
        "dur": _us(span.end_s - span.begin_s),
        "args": {name: value for name, value in args.items() if value is not None},
    }


def _of_mark(mark: Mark, begin_s: float) -> dict[str, Any]:
    args = {"text": mark.label, "step": mark.step}
    return {
        "ph": "i",
        "s": "p",
        "name": mark.name,
        "pid": _pid(mark.process),
        "tid": 0,
        "ts": _us(mark.time_s - begin_s),
        "args": {name: value for name, value in args.items() if value is not None},
    }


def _pid(process: int | None) -> int:
    return JOB if process is None else process + 1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
