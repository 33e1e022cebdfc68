"""The report as one HTML file. What a log says is escaped; only this module's scripts may run.

The policy in the page names the hashes of its two scripts and allows no request. A text that was
escaped wrongly would be neither executed nor sent.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from emergency_ckpt.core.wording import TIER_WORDS, seconds_text, size_text
from emergency_ckpt.extras.event_log.records import LoggedEvent
from emergency_ckpt.tools.report import charts
from emergency_ckpt.tools.report.figures import (
    RestoreBytes,
    RunRecovery,
    byte_sources_of,
    goodput_of,
    recoveries_of,
)
from emergency_ckpt.tools.report.lives import lives_of
from emergency_ckpt.tools.report.spans import Mark, marks_of, newest_marks, spans_of, thinned
from emergency_ckpt.tools.report.summary import figures_of, period_of

MAX_TABLE_ROWS = 200
MAX_TABLE_SOURCES = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run in the page.

    Attributes:
      title: heading of the run.
      events: of all processes, numbered by life.
      notes: sentences below the heading.
      warnings: sentences in a box: damaged lines and the like.
    """

    title: str
    events: Sequence[LoggedEvent]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def page_of(title: str, runs: Sequence[ReportRun]) -> str:
    """Return the HTML of a page about ``runs``, which have at least one event each."""
    script, plotly = _asset("page.js"), get_plotlyjs()
    # A script ends at the first end tag, wherever it stands.
    plotly = plotly.replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; script-src {_hash_of(plotly)} {_hash_of(script)};"
        " style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(_section(index, run) for index, run in enumerate(runs))
    links = "".join(f'<a href="#run{i}">{escape(run.title)}</a>' for i, run in enumerate(runs))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav>{links if len(runs) > 1 else ""}</nav>
<noscript><p class="warning">The timeline needs scripts; the tables are below.</p></noscript>
{body}
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def write_report(out: Path, title: str, runs: Sequence[ReportRun]) -> None:
    """Write the page about ``runs`` to ``out`` atomically. Blocks. Raises OSError."""
    write_whole(out, page_of(title, runs))


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically. Blocks. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def _asset(name: str) -> str:
    return resources.files("emergency_ckpt.tools.report").joinpath(name).read_text("utf-8")


def _hash_of(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _section(index: int, run: ReportRun) -> str:
    events = run.events
    lives = lives_of(events)
    recoveries = recoveries_of(lives, events)
    marks, left_out = newest_marks(marks_of(events))
    warnings = list(run.warnings)
    if left_out:
        warnings.append(f"The {left_out} oldest failures, warnings and notices are left out.")
    boxes = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings)
    notes = "".join(f'<p class="quiet">{escape(text)}</p>' for text in run.notes)
    parts = [
        f'<section id="run{index}"><h2>{escape(run.title)}</h2>{notes}',
        f'<p class="quiet">{escape(period_of(events, lives))}</p>{boxes}',
        _tiles(figures_of(goodput_of(lives, events), recoveries, events)),
        _timeline(index, events, marks),
        _recoveries(recoveries),
        *(_sources(restore) for restore in byte_sources_of(events)),
        _mark_table(marks, events),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _tiles(figures: Mapping[str, str]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures.items()
    )
    caption = (
        "Goodput is the share of training that counts at the end, without stalls for saves."
        " A recovery lasts from the last sign of training until all processes have their state."
    )
    return f'<dl class="figures">{items}</dl><p class="quiet">{escape(caption)}</p>'


def _timeline(index: int, events: Sequence[LoggedEvent], marks: Sequence[Mark]) -> str:
    slices = {e.process: e.slice for e in events if e.process is not None}
    rows = {
        process: str(process) + ("" if slices[process] is None else f", slice {slices[process]}")
        for process in sorted(slices)[: charts.MAX_ROWS]
    }
    if not rows:
        return ""
    spans, left_out = thinned([span for span in spans_of(events) if span.process in rows])
    caption = (
        "Grey: training. Crosses: failures. Circles: warnings and notices. The table below has all."
    )
    if left_out:
        caption += f" The {left_out} shortest bars are left out."
    if len(slices) > len(rows):
        caption += f" {len(slices) - len(rows)} of {len(slices)} processes are left out."
    begin_s = min(event.time_s for event in events)
    figure = charts.timeline(spans, marks, rows, begin_s)
    return _chart(f"timeline{index}", "Timeline", figure, caption)


def _chart(name: str, title: str, figure: dict[str, Any], caption: str) -> str:
    # "<" in JSON would end the element, or begin a comment.
    described = json.dumps(figure, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<h3>{escape(title)}</h3><figure><div class="chart" id="{name}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        f'<script type="application/json" data-chart="{name}">{described}</script>'
    )


def _recoveries(recoveries: Sequence[RunRecovery]) -> str:
    if not recoveries:
        return ""
    heads = (
        "life",
        "last step",
        "back to",
        "from",
        "steps lost",
        "RPO",
        "RTO",
        "of that away",
        "restore",
    )
    rows = [
        (
            str(recovery.life),
            _or_dash(recovery.last_step),
            _or_dash(recovery.restored_step),
            TIER_WORDS.get(recovery.tier, "-"),
            ("at least " if recovery.at_least and recovery.steps_lost is not None else "")
            + _or_dash(recovery.steps_lost),
            _time(recovery.lost_s),
            _time(recovery.recovery_s),
            _time(recovery.away_s),
            _time(recovery.restore_s),
        )
        for recovery in recoveries[:MAX_TABLE_ROWS]
    ]
    caption = (
        "RPO: training between the restored step and the last one. RTO: from the end of training to"
        " the first step after it, or to the restored state where steps were not logged. Away:"
        " until the first event of the new life."
    )
    return f'<h3>Recoveries</h3>{_table(heads, rows)}<p class="quiet">{escape(caption)}</p>'


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _sources(restore: RestoreBytes) -> str:
    sources = restore.sources[:MAX_TABLE_SOURCES]
    if not sources:
        return ""
    shown = dict(list(restore.bytes_of.items())[: charts.MAX_ROWS])
    rows_of = {
        **{f"process {process}": row for process, row in shown.items()},
        "all": restore.totals,
    }
    rows = [
        [name, *(size_text(row[source]) if source in row else "" for source in sources)]
        for name, row in rows_of.items()
    ]
    left_out = len(restore.sources) - len(sources), len(restore.bytes_of) - len(shown)
    note = f"{left_out[0]} sources and {left_out[1]} processes are left out."
    return (
        f"<h3>Sources of each process&#x27;s bytes, life {restore.life}</h3>"
        + _table(["to", *sources], rows)
        + (f'<p class="quiet">{note}</p>' if any(left_out) else "")
    )


def _mark_table(marks: Sequence[Mark], events: Sequence[LoggedEvent]) -> str:
    if not marks:
        return ""
    begin_s = min(event.time_s for event in events)
    rows = [
        (
            f"{mark.time_s - begin_s:.1f} s",
            "job" if mark.process is None else f"process {mark.process}",
            _or_dash(mark.step),
            mark.name,
            mark.label,
        )
        for mark in marks[:MAX_TABLE_ROWS]
    ]
    left_out = len(marks) - len(rows)
    note = f'<p class="quiet">{left_out} more are left out.</p>' if left_out else ""
    heads = ("time", "of", "step", "event", "what it says")
    return f"<h3>Failures, warnings, notices</h3>{_table(heads, rows, css='words')}{note}"


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]], *, css: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
