"""Measure the control cost of a save and a restore for jobs of up to 10,000 processes.

    python -m benchmarks.scale

Measures placement, inventories and the plan of a restore at the leader of a job of 10 to 10,000
processes with 300 leaves that lost nothing, one host or one slice, and counts every byte that a
save's vote and a restore send through the coordination service. The leader's code is the real one;
the other processes and the service are simulated in memory. benchmarks/README.md explains the
figures.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.arguments import positive
from benchmarks.common.tables import markdown

Row = Mapping[str, Any]

SIZES = (10, 100, 1000, 10_000)
SHAPES = ((2, "all_but_primary"), (10, "striped(2)"))
"""Slices and placement. With two slices all hosts of a slice differ: the most manifests."""

LOSSES = ("nothing", "host", "slice")
TARGETS = {
    "plan_s": (2.0, "s", "plan"),
    "leader_bytes": (2**30, "bytes", "memory of the leader for inventories and plan"),
    "save_bytes_per_process": (256, "bytes", "a process's bytes through the service per save"),
    "restore_bytes_per_process": (
        65_536,
        "bytes",
        "a process's bytes through the service per restore",
    ),
}
"""Upper limits at the largest size."""

TIMES = ("place_s", "inventories_s", "plan_s", "hand_out_s", "divergence_s")
MEASURED = (*TIMES, "leader_bytes")
GROWTH = ("place_s", "inventories_s", "plan_s", "divergence_s", "save_bytes", "restore_bytes")
MAX_EXPONENT = 1.15
"""Between 1,000 and 10,000 processes, N log N grows like N to the power of 1.125."""


_MOST_PROCESSES = 1_000_000


def processes(text: str) -> int:
    """Parse a number of processes, up to the number for which the model has addresses."""
    if (value := positive(text)) > _MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{value} is more than {_MOST_PROCESSES}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--sizes", type=processes, nargs="+", default=SIZES, help="processes")
    parser.add_argument("--leaves", type=positive, default=300)
    parser.add_argument("--rounds", type=positive, default=3, help="figures are their medians")
    parser.add_argument("--out", type=Path, default=Path("bench_out"))
    options = parser.parse_args(argv)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    rows = [
        row
        for slices, placement in SHAPES
        for size in options.sizes
        for row in measure(
            slices, max(1, size // slices), options.leaves, placement, options.rounds
        )
    ]
    exponents = growth(rows)
    document = {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": options.rounds,
        "rows": rows,
        "growth": exponents,
    }
    (options.out / "scale.json").write_text(json.dumps(document, indent=2))
    text = "\n\n".join([table(rows), *(growth_lines(exponents)), *verdicts(rows)])
    (options.out / "scale.md").write_text(text + "\n")
    print(text)
    return 0


def measure(slices: int, hosts: int, leaves: int, placement: str, rounds: int) -> list[Row]:
    """Return a row per loss: medians over the rounds, each with the leader in a fresh process."""
    cell = {"slices": slices, "hosts": hosts, "leaves": leaves, "placement": placement}
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="eckpt-scale-") as directory:
        _run("build", directory, cell | {"lost": "nothing"})
        for lost in LOSSES:
            order = cell | {"lost": lost}
            found.append(
                medians([json.loads(_run("lead", directory, order)) for _ in range(rounds)])
            )
            print(f"{slices * hosts} processes, {placement}, {lost} lost: done", file=sys.stderr)
    return found


def medians(rounds: Sequence[Row]) -> Row:
    """Return medians of rows that differ in measured values only; else ValueError."""
    middle = {key: statistics.median(row[key] for row in rounds) for key in MEASURED}
    counted = [{k: v for k, v in row.items() if k not in MEASURED} for row in rounds]
    if any(other != counted[0] for other in counted):
        raise ValueError(f"rounds of one cell count differently: {counted}")
    return counted[0] | middle


def _run(stage: str, directory: str, cell: Mapping[str, Any]) -> str:
    command = [sys.executable, "-m", "benchmarks.scale.cell", stage, directory, json.dumps(cell)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return run.stdout


def table(rows: Iterable[Row]) -> str:
    header = [
        "processes",
        "placement",
        "lost",
        "place s",
        "inventories s",
        "plan s",
        "hand out s",
        "divergence s",
        "leader MiB",
        "save B/process",
        "save MB",
        "restore B/process",
        "restore MB",
        "manifests MB",
        "busiest/mean",
    ]
    lines = [
        [
            f"{row['slices']} x {row['hosts']}",
            row["placement"],
            row["lost"],
            *(f"{row[name]:.3g}" for name in TIMES),
            f"{row['leader_bytes'] / 2**20:.0f}",
            f"{row['save_bytes_per_process']}",
            f"{row['save_bytes'] / 1e6:.3g}",
            f"{row['restore_bytes_per_process']}",
            f"{row['restore_bytes'] / 1e6:.3g}",
            f"{row['manifest_bytes'] / 1e6:.3g}",
            "-" if row["busiest_to_mean"] is None else f"{row['busiest_to_mean']:.2f}",
        ]
        for row in rows
    ]
    return markdown([header, *lines])


def growth(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the exponents of N over sizes of at least 100 processes, by placement and loss."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        if row["processes"] >= 100:
            series.setdefault(f"{row['placement']}, {row['lost']} lost", []).append(row)
    return {
        name: {key: exponent([(r["processes"], r[key]) for r in some]) for key in GROWTH}
        for name, some in series.items()
        if len(some) > 1
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of log y over log x, by least squares."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(max(y, 1e-9)) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def growth_lines(exponents: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        f"growth with N, {name}: "
        + ", ".join(f"{key} N^{value:.2f}" for key, value in sorted(found.items()))
        + (" (above N log N)" if max(found.values()) > MAX_EXPONENT else "")
        for name, found in exponents.items()
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return one line for each target, at the largest size that was measured."""
    largest = max(row["processes"] for row in rows)
    lines: list[str] = []
    for key, (limit, unit, what) in TARGETS.items():
        worst = max(row[key] for row in rows if row["processes"] == largest)
        word = "met" if worst <= limit else "MISSED"
        lines.append(f"{word}: {what}, {largest} processes: {worst:.4g} {unit} of {limit:.4g}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
