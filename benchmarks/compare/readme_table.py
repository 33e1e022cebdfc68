"""Write the results of the comparison into RESULTS.md and the README."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.common.tables import markdown, number
from benchmarks.compare import report, targets

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_NOTE = (
    "The stall is the time that training loses inside `save`. Arrays that the devices are still"
    " computing are waited for as well, as the next step would do without a save; Orbax's managers"
    " do not tell that wait."
)
_ROWS = (
    *("stall", "computed", "ready", "published"),
    *("restore_nothing_lost", "restore_lost_slice", "restore_lost_halves"),
    *("storage_save", "storage_restore"),
)
_TITLES = {measure.key: measure.title for measure in report.MEASURES}


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
    rows = [row[1:] for row in _rows(job, names) if row[1] != _TITLES["ready"]]
    return "\n".join(
        [
            f"{_about(document)} A state of {shape['state_bytes'] / 2**30:g} GiB on"
            f" {shape['slices']} slices; medians, and in brackets how many times ours. Arrays that"
            " are still being computed are waited for, as the next step would do without a save.",
            "",
            markdown([["", *names], *rows]),
        ]
    )


def _about(document: Mapping[str, Any]) -> str:
    about = document["machine"]
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    return f"{machine.text(about)}, {document['date']}{commit}."


def section(document: Mapping[str, Any]) -> str:
    """Return ``compare.json`` as Markdown: medians, and the others' as multiples of ours."""
    names = list(document["jobs"][0]["contenders"])
    rows = [row for job in document["jobs"] for row in _rows(job, names)]
    rates = report.limit_medians(document["limits_gb_per_s"])
    limits = "; ".join(f"{name} {number(rate)}" for name, rate in rates.items())
    return "\n".join(
        [
            f"{_about(document)} Jobs are slices x hosts x MiB / leaves; medians, and in brackets"
            " how many times ours.",
            "",
            markdown([["job", "", *names], *rows]),
            "",
            _NOTE,
            "",
            f"Limits of this machine, GB/s: {limits}.",
        ]
    )


def _rows(job: Mapping[str, Any], names: list[str]) -> Iterator[list[str]]:
    for key in _ROWS:
        medians = {
            name: contender["summary"][key]["median"]
            for name, contender in job["contenders"].items()
        }
        if any(value is not None for value in medians.values()):
            ours = medians.get(targets.OURS)
            cells = [_cell(medians.get(name), ours, name) for name in names]
            yield [job["job"]["name"], _TITLES[key], *cells]


def _cell(seconds: float | None, ours_s: float | None, name: str) -> str:
    if seconds is None:
        return "-"
    shown = f"{number(seconds * 1e3)} ms" if seconds < 1 else f"{number(seconds)} s"
    if name == targets.OURS or not ours_s:
        return shown
    return f"{shown} ({number(seconds / ours_s)}x)"


if __name__ == "__main__":
    sys.exit(main())
