"""The timeline of a report as Plotly takes it.

Plotly reads a few tags in its texts, links among them. Text from a log is escaped for it too.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from emergency_ckpt.core.wording import seconds_text
from emergency_ckpt.tools.report.spans import KINDS, Mark, Span

MAX_ROWS = 64
"""Processes in the timeline of a run; those with the lowest numbers."""

# Okabe and Ito's colours, which most people can tell apart, on white and on black.
_COLOURS = {
    "training": "rgba(128, 128, 128, 0.25)",
    "save to RAM": "#0072B2",
    "save to storage": "#E69F00",
    "stall": "#D55E00",
    "restore": "#009E73",
    "planning": "#CC79A7",
    "reading storage": "#E69F00",
    "reading RAM and peers": "#56B4E9",
    "handing over, waits": "#999999",
}
# From the middle of a process's row: where the lane begins, and its height.
_LANES = {
    "training": (-0.42, 0.84),
    "restore": (-0.4, 0.2),
    "planning": (-0.18, 0.14),
    "reading storage": (-0.18, 0.14),
    "reading RAM and peers": (-0.18, 0.14),
    "handing over, waits": (-0.18, 0.14),
    "stall": (-0.02, 0.1),
    "save to RAM": (0.08, 0.14),
    "save to storage": (0.24, 0.14),
}
_FAILURE = "#D00000"
_NOTICE = "#777777"
_ROW_PX = 56
_MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}
_LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def plain(text: str) -> str:
    """Return ``text`` so that Plotly shows it as it is."""
    return html.escape(text, quote=False)


def timeline(
    spans: Sequence[Span], marks: Sequence[Mark], rows: dict[int, str], begin_s: float
) -> dict[str, Any]:
    """Return bars by process and time, and the marks.

    Args:
      rows: processes to show, in order, and their names.
      begin_s: Unix time of the figure's 0.
    """
    at = {process: index for index, process in enumerate(rows)}
    data = [
        _bars(
            kind, [span for span in spans if span.kind == kind and span.process in at], at, begin_s
        )
        for kind in KINDS
        if any(span.kind == kind and span.process in at for span in spans)
    ]
    shown = [mark for mark in marks if mark.process is None or mark.process in at]
    for is_failure in (True, False):
        alike = [mark for mark in shown if mark.is_failure == is_failure]
        if alike:
            data.append(_marks(alike, at, begin_s, is_failure=is_failure))
    has_job_row = any(mark.process is None for mark in shown)
    names = list(rows.values())
    ticks = dict(enumerate(names)) | ({-1: "job"} if has_job_row else {})
    layout = {
        "barmode": "overlay",
        "height": 180 + _ROW_PX * len(ticks),
        "margin": _MARGIN,
        "legend": _LEGEND,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "seconds since the first event"}, "automargin": True},
        "yaxis": {
            "range": [len(rows) - 0.4, -1.6 if has_job_row else -0.6],
            "tickvals": list(ticks),
            "title": {"text": "process"},
            "ticktext": [plain(name) for name in ticks.values()],
            "automargin": True,
            "fixedrange": True,
            "zeroline": False,
        },
    }
    return _checked(data, layout)


def _bars(kind: str, spans: Sequence[Span], at: dict[int, int], begin_s: float) -> dict[str, Any]:
    offset, width = _LANES[kind]
    colour = _COLOURS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "base": [_rounded(span.begin_s - begin_s) for span in spans],
        "x": [_rounded(span.end_s - span.begin_s) for span in spans],
        "y": [at[span.process] for span in spans if span.process is not None],
        "offset": offset,
        "width": width,
        # The line keeps what is shorter than a pixel visible.
        "marker": {
            "color": colour,
            "line": {"color": colour, "width": 0 if kind == "training" else 1},
        },
        "customdata": [_words_of(span) for span in spans],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _words_of(span: Span) -> str:
    step = "" if span.step is None else f", step {span.step}"
    ending = " or longer: its end is not in the log" if span.unfinished else ""
    time = seconds_text(span.end_s - span.begin_s)
    return f"process {span.process}: {span.kind}{step}, {time}{ending}"


def _marks(
    marks: Sequence[Mark], at: dict[int, int], begin_s: float, *, is_failure: bool
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "failure" if is_failure else "warning, notice",
        "x": [_rounded(mark.time_s - begin_s) for mark in marks],
        "y": [-1 if mark.process is None else at[mark.process] for mark in marks],
        "marker": {
            "symbol": "x" if is_failure else "circle-open",
            "size": 9 if is_failure else 6,
            "color": _FAILURE if is_failure else _NOTICE,
        },
        "customdata": [plain(f"{mark.name}: {mark.label}") for mark in marks],
        "hovertemplate": "%{customdata}<extra></extra>",
        "cliponaxis": False,
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


def _checked(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """Return the figure; Plotly raises ValueError for a property that it does not know."""
    go.Figure(data=data, layout=layout)
    return json.loads(json.dumps({"data": data, "layout": layout}, allow_nan=False))
