"""The report of an event log, written to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from emergency_ckpt.core.wording import count_text
from emergency_ckpt.tools.report.page import ReportRun, page_of
from emergency_ckpt.tools.report.reading import LogReading, read_log


def write_log_report(directory: Path, out: Path) -> LogReading:
    """Write the report of the event log in ``directory`` to ``out``; return what was read.

    Blocks. Raises:
      CheckpointError: no event log.
      OSError: a file cannot be read or written.
    """
    reading = read_log(directory)
    runs = ", ".join(run_id for run_id in reading.run_ids if run_id)
    run = ReportRun(
        title=f"Run {runs}" if runs else "Run",
        events=reading.events,
        notes=[f"{count_text(reading.files, 'file', 'files')} of events"],
        warnings=reading.warnings,
    )
    write_report(out, "Report of a training run", [run])
    return reading


def write_report(out: Path, title: str, runs: Sequence[ReportRun]) -> None:
    """Write the page about ``runs`` to ``out`` atomically. Blocks. Raises OSError."""
    write_whole(out, page_of(title, runs))


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically. Blocks. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)
