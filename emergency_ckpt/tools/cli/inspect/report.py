"""``eckpt report``: one HTML file about a run, from its event log."""

from __future__ import annotations

import argparse
from pathlib import Path

from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.report.page import write_report
from emergency_ckpt.tools.report.reading import read_log

EXAMPLE = "eckpt report logs/events -o report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.description = (
        "Writes one HTML file about a run: a timeline of each process, where the bytes of each"
        " restore came from, step times, steps lost, RPO, RTO and goodput. The file needs no"
        " network. The log may belong to a job that runs; it is only read."
    )
    parser.epilog = "exit status: 0 written; 1 no such log or no event in it; 2 wrong command line"
    parser.add_argument("directory", type=Path, metavar="EVENT_LOG_DIR", help="the job's event_log")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="file to write"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; return 0.

    Raises:
      CheckpointError: the directory holds no event log.
      OSError: a file cannot be read or written.
    """
    read = read_log(args.directory)
    write_report(args.output, "Report of a training run", [read])
    for warning in read.warnings:
        print_line(f"warning: {warning}")
    print_line(str(args.output))
    return 0
