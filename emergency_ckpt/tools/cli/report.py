"""``eckpt report``: figures, a page and a trace of a run, from its event log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.report.figures import summary_lines
from emergency_ckpt.tools.report.lives import read_log
from emergency_ckpt.tools.report.page import page_of, write_whole
from emergency_ckpt.tools.report.spans import trace_of

EXAMPLE = "eckpt report logs/events -o report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.description = (
        "Prints the figures of a run (goodput, steps lost, RPO, RTO) and its failures, and writes"
        " one HTML file with these and a timeline of each process. The file needs no network. The"
        " log may belong to a job that runs; it is only read."
    )
    parser.epilog = "exit status: 0 written; 1 no such log or no event in it; 2 wrong command line"
    parser.add_argument("directory", type=Path, metavar="EVENT_LOG_DIR", help="the job's event_log")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="file to write"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the timeline as a trace too, for ui.perfetto.dev and TensorBoard",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; return 0.

    Raises:
      CheckpointError: the directory holds no event log.
      OSError: a file cannot be read or written.
    """
    read = read_log(args.directory)
    write_whole(args.output, page_of("Report of a training run", [read]))
    for warning in read.warnings:
        print_line(f"warning: {warning}")
    for line in summary_lines(read.events):
        print_line(line)
    if args.trace is not None:
        write_whole(args.trace, json.dumps(trace_of(read.events)))
        print_line(str(args.trace))
    print_line(str(args.output))
    return 0
