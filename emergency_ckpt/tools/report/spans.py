"""The work of each process over time, as bars and marks; and as a trace.

The trace is for Perfetto (ui.perfetto.dev) and TensorBoard. Its format is Chrome's:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.lives import bounded_text, number, text, whole
from emergency_ckpt.types import LOCAL, PERSISTENT

MAX_SPANS_OF_A_KIND = 1000

KINDS = (
    "training",
    "save to RAM",
    "save to storage",
    "stall",
    "restore",
    "planning",
    "reading storage",
    "reading RAM and peers",
    "handing over, waits",
)
"""Kinds of bars, in the order of a legend."""

_ROWS = {kind: row for row, kind in enumerate(KINDS, start=1)}
JOB = 0
"""The row of what no process has reported; process p has the row p + 1."""

_ENDS = {
    "save.complete": LOCAL,
    "save.incomplete": LOCAL,
    "persistent.complete": PERSISTENT,
    "persistent.failed": PERSISTENT,
}
_RESTORE_ENDS = {"restore.finished", "restore.nothing"}
_PHASES = {
    "restore.stage.planned": "planning",
    "restore.stage.loaded": "reading storage",
    "restore.stage.fetched": "reading RAM and peers",
}
_FAILURES = frozenset(
    {
        "divergence",
        "fault.fired",
        "hang.found",
        "job.failed",
        "persistent.failed",
        "persistent.problem.unreachable",
        "preemption.missed.no_save",
        "preemption.missed.not_written",
        "ram.off.given_up",
        "ram.lost",
        "restore.failed",
        "restore.peer_unreachable",
        "restore.quarantined",
        "save.incomplete",
        "stop.error",
        "stop.not_saved",
    }
)
_WARNINGS = frozenset(
    {
        "preemption.reached",
        "restore.rejected",
        "restore.stage.replanned",
        "restore.suspect",
        "save.non_finite",
        "save.skipped.late",
        "save.unchanged",
        "warning.setting",
    }
)
_DETAILS = ("hosts", "tier", "role", "peer", "holder", "shard", "leaf", "reason", "detail", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One bar. ``process`` is None for what started the job. ``unfinished``: its end is unknown."""

    process: int | None
    kind: str
    begin_s: float
    end_s: float
    step: int | None = None
    unfinished: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """One moment: a failure, else a warning or a notice. ``label`` is text from the log."""

    process: int | None
    name: str
    time_s: float
    step: int | None
    label: str
    is_failure: bool


def spans_of(events: Sequence[LoggedEvent]) -> list[Span]:
    """Return the bars of all processes, from events that are numbered by life."""
    parts: dict[tuple[int | None, int], list[LoggedEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time_s):
        parts[event.process, event.life].append(event)
    spans: list[Span] = []
    for (process, _), part in parts.items():
        if process is not None:
            spans += _training(process, part)
            spans += _saves(process, part)
            spans += _stalls(process, part)
            spans += _restores(process, part)
    return sorted(spans, key=lambda span: (span.begin_s, span.end_s))


def _training(process: int, part: Iterable[LoggedEvent]) -> list[Span]:
    """Return the bars of training: each begins after a restore, else with a step."""
    spans: list[Span] = []
    for event in part:
        at_s, is_step = event.time_s, event.name in ("train.step", "save.started")
        if event.name in _RESTORE_ENDS or (is_step and not spans):
            spans.append(_span(process, "training", at_s, at_s, None))
        if is_step:
            spans[-1] = dataclasses.replace(spans[-1], end_s=at_s, step=whole(event, "step"))
    return [span for span in spans if span.end_s > span.begin_s]


def _saves(process: int, part: Sequence[LoggedEvent]) -> list[Span]:
    spans: list[Span] = []
    begun: dict[tuple[str, int | None], float] = {}
    for event in part:
        step = whole(event, "step")
        tier = _ENDS.get(event.name) or text(event, "tier")
        is_end = event.name in _ENDS or (event.name == "save.skipped" and tier)
        kind = "save to storage" if tier == PERSISTENT else "save to RAM"
        if event.name == "save.started":
            begun[kind, step] = event.time_s
        elif is_end and (kind, step) in begun:
            begin_s = begun.pop((kind, step))
            spans.append(_span(process, kind, begin_s, event.time_s, step))
    last_s = part[-1].time_s
    for (kind, step), begin_s in begun.items():
        span = _span(process, kind, begin_s, last_s, step)
        spans.append(dataclasses.replace(span, unfinished=True))
    return spans


def _stalls(process: int, part: Iterable[LoggedEvent]) -> list[Span]:
    spans: list[Span] = []
    for event in part:
        stall_s = number(event, "seconds") if event.name == "save.captured" else None
        if stall_s is not None:
            begin_s = event.time_s - stall_s
            spans.append(_span(process, "stall", begin_s, event.time_s, whole(event, "step")))
    return spans


def _restores(process: int, part: Sequence[LoggedEvent]) -> list[Span]:
    spans: list[Span] = []
    begun_s: float | None = None
    phase_s: float | None = None
    step: int | None = None
    for event in part:
        step = whole(event, "step") if whole(event, "step") is not None else step
        if event.point == "restore.stage.started":
            begun_s = phase_s = event.time_s
        elif event.point in _PHASES and phase_s is not None:
            spans.append(_span(process, _PHASES[event.point], phase_s, event.time_s, step))
            phase_s = event.time_s
        elif event.name in _RESTORE_ENDS:
            seconds = number(event, "seconds")
            if begun_s is None and seconds is not None:  # of Orbax's object, which says no more
                begun_s = event.time_s - seconds
            if begun_s is not None:
                spans.append(_span(process, "restore", begun_s, event.time_s, step))
            if phase_s is not None and event.name == "restore.finished":
                spans.append(_span(process, "handing over, waits", phase_s, event.time_s, step))
            begun_s = phase_s = None
    if begun_s is not None:
        span = _span(process, "restore", begun_s, part[-1].time_s, step)
        spans.append(dataclasses.replace(span, unfinished=True))
    return spans


def _span(process: int, kind: str, begin_s: float, end_s: float, step: int | None) -> Span:
    return Span(process=process, kind=kind, begin_s=begin_s, end_s=max(begin_s, end_s), step=step)


def marks_of(events: Sequence[LoggedEvent]) -> list[Mark]:
    """Return failures, warnings and notices by time, and deaths of processes."""
    marks = [_mark(event) for event in events]
    known = [mark for mark in marks if mark is not None]
    return sorted([*known, *_unexplained_ends(events)], key=lambda mark: mark.time_s)


def _mark(event: LoggedEvent) -> Mark | None:
    returncode = event.fields.get("returncode") if event.name == "process.exited" else None
    is_failure = event.point in _FAILURES or returncode not in (0, None)
    if not is_failure and event.point not in _WARNINGS:
        return None
    details = [f"{field} {text(event, field)}" for field in _DETAILS if text(event, field)]
    if returncode is not None:
        details = [f"exit status {text(event, 'returncode')}"]
    return Mark(
        process=whole(event, "process") if event.process is None else event.process,
        name=bounded_text(event.point),
        time_s=event.time_s,
        step=whole(event, "step"),
        label=bounded_text(", ".join(details)),
        is_failure=is_failure,
    )


def _unexplained_ends(events: Sequence[LoggedEvent]) -> list[Mark]:
    """Return a mark where the log of a process in a life has no end and the job began again.

    The events of ``eckpt launch`` explain the ends of its processes.
    """
    if any(event.name == "process.exited" for event in events):
        return []
    parts: dict[tuple[int, int], list[LoggedEvent]] = defaultdict(list)
    for event in events:
        if event.process is not None:
            parts[event.process, event.life].append(event)
    last_life = max((life for _, life in parts), default=0)
    return [
        Mark(
            process=process,
            name="process.lost",
            time_s=max(event.time_s for event in part),
            step=max((whole(e, "step") or 0 for e in part if e.name == "train.step"), default=None),
            label="its log has no end: it was killed, or its host was lost",
            is_failure=True,
        )
        for (process, life), part in parts.items()
        if life < last_life and not any(event.name == "stop" for event in part)
    ]


def thinned(spans: Sequence[Span]) -> tuple[list[Span], int]:
    """Return at most ``MAX_SPANS_OF_A_KIND`` of each kind, the longest, and how many were left out.

    A browser draws no more in reasonable time, and the short ones cannot be seen.
    """
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    kept: list[Span] = []
    for of_kind in by_kind.values():
        of_kind.sort(key=lambda span: span.begin_s - span.end_s)
        kept += of_kind[:MAX_SPANS_OF_A_KIND]
    return sorted(kept, key=lambda span: span.begin_s), len(spans) - len(kept)


def trace_of(events: Sequence[LoggedEvent]) -> dict[str, Any]:
    """Return the trace of events that are numbered by life; its times begin with the first one."""
    begin_s = min(event.time_s for event in events)
    slices = {event.process: event.slice for event in events if event.process is not None}
    names = {JOB: "job"} if any(event.process is None for event in events) else {}
    for process, slice_index in sorted(slices.items()):
        of_slice = "" if slice_index is None else f", slice {slice_index}"
        names[process + 1] = f"process {process}{of_slice}"
    spans = spans_of(events)
    rows = sorted({(_pid(span.process), span.kind) for span in spans})
    entries = [
        *(_entry("M", "process_name", pid, {"name": name}, tid=0) for pid, name in names.items()),
        *(_entry("M", "thread_name", pid, {"name": kind}, tid=_ROWS[kind]) for pid, kind in rows),
    ]
    for span in spans:
        args = {"step": span.step, "its end is not in the log": span.unfinished or None}
        times = {"ts": _us(span.begin_s - begin_s), "dur": _us(span.end_s - span.begin_s)}
        row = _ROWS[span.kind]
        entries.append(_entry("X", span.kind, _pid(span.process), args, tid=row, **times))
    for mark in marks_of(events):
        args, at_us = {"text": mark.label, "step": mark.step}, _us(mark.time_s - begin_s)
        entries.append(_entry("i", mark.name, _pid(mark.process), args, s="p", tid=0, ts=at_us))
    for event in events:
        if event.name == "train.step":
            args, at_us = {"step": whole(event, "step")}, _us(event.time_s - begin_s)
            entries.append(_entry("C", "step", _pid(event.process), args, ts=at_us))
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _entry(
    phase: str, name: str, pid: int, args: Mapping[str, object], **fields: object
) -> dict[str, Any]:
    """Return an entry of the trace, without the arguments that are not known."""
    there = {key: value for key, value in args.items() if value is not None}
    return {"ph": phase, "name": name, "pid": pid, **fields, "args": there}


def _pid(process: int | None) -> int:
    return JOB if process is None else process + 1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
