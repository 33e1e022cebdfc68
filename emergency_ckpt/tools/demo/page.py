"""The demo's page: the report of each of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from emergency_ckpt.tools.demo.report import FinishedRun
from emergency_ckpt.tools.report.page import ReportRun
from emergency_ckpt.tools.report.reading import run_events
from emergency_ckpt.tools.report.writing import write_report


def write_demo_report(path: Path, baseline: FinishedRun, faulty: Mapping[str, FinishedRun]) -> None:
    """Write one page about the runs with a fault, by scenario, and the undisturbed one."""
    runs = {**faulty, "undisturbed": baseline}
    sections = [
        ReportRun(title=name, events=run_events(record.events))
        for name, record in runs.items()
        if record.events
    ]
    write_report(path, "Runs of eckpt demo", sections)
