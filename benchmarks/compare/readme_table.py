"""Write the results of the comparison into RESULTS.md and the README."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.common.tables import markdown
from benchmarks.compare import report

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_NOTE = (
    "The stall is the time that training loses inside `save`. Arrays that the devices are still"
    " computing are waited for as well, as the next step would do without a save; Orbax's managers"
    " do not tell that wait."
)
_WAIT = next(measure.title for measure in report.SHOWN if measure.key == "ready")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("bench_out/compare.json"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/RESULTS.md"))
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    options = parser.parse_args(arguments)
    try:
        document = json.loads(options.json.read_text())
        results = with_table(options.results.read_text(), section(document))
        readme = with_table(options.readme.read_text(), summary(document))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"cannot write the table: {error!r}")
    options.results.write_text(results)
    options.readme.write_text(readme)
    return 0


def with_table(text: str, table: str) -> str:
    """Return ``text`` with ``table`` between the two marks. ValueError without the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN} and {END} are not there")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def summary(document: Mapping[str, Any]) -> str:
    """Return the table of the first job, the largest, as Markdown for the README."""
    job = document["jobs"][0]
    names = list(job["contenders"])
    shape = job["job"]
    rows = [row[1:] for row in report.rows(job, names) if row[1] != _WAIT]
    return "\n".join(
        [
            f"{_about(document)} A state of {shape['state_bytes'] / 2**30:g} GiB on"
            f" {shape['slices']} slices; medians, and in brackets how many times ours. Arrays that"
            " are still being computed are waited for, as the next step would do without a save.",
            "",
            markdown([["", *names], *rows]),
        ]
    )


def section(document: Mapping[str, Any]) -> str:
    """Return ``compare.json`` as Markdown for RESULTS.md."""
    about = f"{_about(document)} Jobs are slices x hosts x MiB / leaves; medians, and in brackets"
    return "\n\n".join(
        [
            f"{about} how many times ours.",
            report.table(document["jobs"]),
            _NOTE,
            report.limits(document["limits_gb_per_s"]),
        ]
    )


def _about(document: Mapping[str, Any]) -> str:
    about = document["machine"]
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    return f"{machine.text(about)}, {document['date']}{commit}."


if __name__ == "__main__":
    sys.exit(main())
