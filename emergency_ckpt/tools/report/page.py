"""The report as one HTML file: the summary, and a timeline of each process.

The page has no script, and its policy allows no request: a text that was escaped wrongly would be
neither executed nor sent. To zoom, open the trace in Perfetto.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from emergency_ckpt.core.wording import seconds_text
from emergency_ckpt.extras.event_log import LoggedEvent
from emergency_ckpt.tools.report.figures import summary_lines
from emergency_ckpt.tools.report.lives import ReportRun
from emergency_ckpt.tools.report.spans import KINDS, Mark, Span, marks_of, spans_of, thinned

MAX_ROWS = 64
"""Processes in the timeline of a run; those with the lowest numbers."""
MAX_MARKS = 1000

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

# Okabe and Ito's colours, which most people can tell apart, on white and on black.
_COLOURS = {
    "training": "#80808040",
    "save to RAM": "#0072b2",
    "save to storage": "#e69f00",
    "stall": "#d55e00",
    "restore": "#009e73",
    "planning": "#cc79a7",
    "reading storage": "#e69f00",
    "reading RAM and peers": "#56b4e9",
    "handing over, waits": "#999999",
}
# The lane of a kind in a process's row: its top and its height.
_LANES = {
    "training": (0, 40),
    "restore": (2, 8),
    "stall": (20, 5),
    "save to RAM": (26, 6),
    "save to storage": (33, 6),
}
_PHASE_LANE = (11, 7)
_ROW = 46
_LEFT, _WIDTH = 130, 1150
_TICKS = 8
_CAPTION = "Crosses: failures. Circles: warnings and notices. What a bar says is in its tooltip."


def page_of(title: str, runs: Sequence[ReportRun]) -> str:
    """Return the HTML of a page about ``runs``, which have at least one event each."""
    css = Path(__file__).with_name("page.css").read_text("utf-8")
    body = "\n".join(line for run in runs for line in _section(run))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically. Blocks. Raises OSError."""
    if not path.name:  # a root, or the working directory
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def _section(run: ReportRun) -> Iterator[str]:
    yield f"<h2>{escape(run.title)}</h2>"
    for warning in run.warnings:
        yield f'<p class="warning">{escape(warning)}</p>'
    yield "<ul>"
    for line in summary_lines(run.events):
        yield f"<li>{escape(line)}</li>"
    yield "</ul>"
    yield from _timeline(run.events)


def _timeline(events: Sequence[LoggedEvent]) -> Iterator[str]:
    slices = {event.process: event.slice for event in events if event.process is not None}
    shown = sorted(slices)[:MAX_ROWS]
    if not shown:
        return
    tops = {process: _ROW * (row + 1) for row, process in enumerate(shown)}  # above: the job
    spans, spans_left_out = thinned([span for span in spans_of(events) if span.process in tops])
    all_marks = marks_of(events)
    marks = all_marks[-MAX_MARKS:]
    times_s = [event.time_s for event in events]
    begin_s, seconds = min(times_s), (max(times_s) - min(times_s)) or 1.0

    def at(time_s: float) -> float:
        return round(_LEFT + (time_s - begin_s) / seconds * (_WIDTH - _LEFT - 20), 2)

    height = _ROW * (len(shown) + 1) + 24
    yield f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img">'
    for tick in range(_TICKS + 1):
        time_s = begin_s + seconds * tick / _TICKS
        x = at(time_s)
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}"/>'
        yield f'<text x="{x - 10}" y="{height - 6}">{seconds * tick / _TICKS:.4g} s</text>'
    yield f'<text x="0" y="{_ROW / 2}">job</text>'
    for process, top in tops.items():
        of_slice = "" if slices[process] is None else f", slice {slices[process]}"
        yield f'<text x="0" y="{top + _ROW / 2}">process {process}{of_slice}</text>'
    for span in spans:
        assert span.process is not None
        top, lane_height = _LANES.get(span.kind, _PHASE_LANE)
        x, width = at(span.begin_s), max(at(span.end_s) - at(span.begin_s), 0.5)
        yield (
            f'<rect x="{x}" y="{tops[span.process] + top}" width="{width:.2f}"'
            f' height="{lane_height}" fill="{_COLOURS[span.kind]}">'
            f"<title>{escape(_words_of(span))}</title></rect>"
        )
    tops_of_marks: dict[int | None, int] = {None: 0, **tops}
    for mark in marks:
        if mark.process in tops_of_marks:
            yield _drawn(mark, at(mark.time_s), tops_of_marks[mark.process])
    yield "</svg></div>"
    kinds = {span.kind for span in spans}
    yield '<p class="quiet">'
    for kind in KINDS:
        if kind in kinds:
            yield f'<span class="key" style="background:{_COLOURS[kind]}"></span>{kind}'
    yield f'</p><p class="quiet">{_CAPTION}'
    left_out = {
        "shortest bars": spans_left_out,
        "oldest failures, warnings and notices": len(all_marks) - len(marks),
        "last processes": len(slices) - len(shown),
    }
    for what, count in left_out.items():
        if count:
            yield f" The {count} {what} are left out."
    yield "</p>"


def _drawn(mark: Mark, x: float, top: float) -> str:
    y = top + _ROW / 2
    shape = f'<circle class="notice" cx="{x}" cy="{y}" r="4">'
    if mark.is_failure:
        cross = f"M{x - 5} {y - 5}l10 10m0 -10l-10 10"
        shape = f'<path class="failure" d="{cross}">'
    end = "</path>" if mark.is_failure else "</circle>"
    return f"{shape}<title>{escape(f'{mark.name}: {mark.label}')}</title>{end}"


def _words_of(span: Span) -> str:
    step = "" if span.step is None else f", step {span.step}"
    ending = " or longer: its end is not in the log" if span.unfinished else ""
    time = seconds_text(span.end_s - span.begin_s)
    return f"process {span.process}: {span.kind}{step}, {time}{ending}"
