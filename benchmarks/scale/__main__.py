"""Measure the control cost of a save and a restore for jobs of up to 10,000 processes.

    python -m benchmarks.scale

Measures placement, inventories and the plan of a restore at the leader of a job of 10 to 10,000
processes with 300 leaves that lost nothing, one host or one slice, and counts every byte that a
save's vote and a restore send through the coordination service. The leader's code is the real one;
the other processes and the service are simulated in memory. Then times the rounds of a start and a
restore of 4 to 10,000 processes over a real coordination service. benchmarks/README.md explains the
figures.
"""

import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, program
from benchmarks.common.program import positive
from benchmarks.common.tables import markdown, middle_of, number
from benchmarks.scale import cell, rounds
from benchmarks.scale.job import Cell, Stored, build

Row = Mapping[str, Any]

SIZES = (10, 100, 1000, 10_000)
SHAPES = ((2, "all_but_primary"), (10, "striped(2)"))
"""Slices and placement. With two slices all hosts of a slice differ: the most manifests."""

LOSSES = ("nothing", "host", "slice")
_THROUGH = "a process's bytes through the service per"
TARGETS = {
    "plan_s": (2.0, "s", "plan"),
    "leader_bytes": (2**30, "bytes", "memory of the leader for inventories and plan"),
    "save_bytes_per_process": (256, "bytes", f"{_THROUGH} save"),
    "restore_bytes_per_process": (65_536, "bytes", f"{_THROUGH} restore"),
}
"""Upper limits at the largest size."""
ROUND_SIZES = (4, 16, 64, 256, 1024, 10_000)
MAX_LEADER_S = 2.0
"""Upper limit of the leader's CPU time in a start and a restore, at the largest size."""

MEASURED = ("place_s", "inventories_s", "plan_s", "divergence_s", "leader_bytes")
GROWTH = ("place_s", "inventories_s", "plan_s", "divergence_s", "save_bytes", "restore_bytes")
MAX_EXPONENT = 1.15
"""Between 1,000 and 10,000 processes, N log N grows like N to the power of 1.125."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.new_parser("scale", __doc__)
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="processes")
    parser.add_argument(
        "--round-sizes", type=positive, nargs="*", default=ROUND_SIZES, help="of the rounds"
    )
    parser.add_argument("--leaves", type=positive, default=300)
    parser.add_argument("--rounds", type=positive, default=3, help="figures are their medians")
    options = parser.parse_args(argv)
    about = machine.facts()
    rows = [
        row
        for slices, placement in SHAPES
        for size in options.sizes
        for row in measure(
            slices, max(1, size // slices), options.leaves, placement, options.rounds
        )
    ]
    exponents = growth(rows)
    jobs = [
        measure_rounds(max(1, size // 2), options.leaves, options.rounds)
        for size in options.round_sizes
    ]
    parts = [table(rows), *(growth_lines(exponents)), *verdicts(rows)]
    parts += [rounds_table(jobs), rounds_verdict(jobs[-1])] if jobs else []
    document = {
        "rounds": options.rounds,
        "rows": rows,
        "growth": exponents,
        "start_and_restore": jobs,
    }
    program.publish(options, "scale", about, "\n\n".join(parts), document)
    return 0


def measure(slices: int, hosts: int, leaves: int, placement: str, repeats: int) -> list[Row]:
    """Return a row per loss: medians over the rounds, each with the leader in a fresh process."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="eckpt-scale-") as directory:
        nothing_lost = Cell(slices, hosts, leaves, placement, "nothing")
        stored = build(Path(directory), nothing_lost)
        for lost in LOSSES:
            job = dataclasses.replace(nothing_lost, lost=lost)
            found.append(
                medians([_in_fresh_process(cell.lead, job, stored) for _ in range(repeats)])
            )
            print(f"{slices * hosts} processes, {placement}, {lost} lost: done", file=sys.stderr)
    return found


def measure_rounds(hosts: int, leaves: int, repeats: int) -> Row:
    """Return the rounds of a start and a restore of two slices, medians, and the load meanwhile."""
    slices, placement = SHAPES[0]
    job = Cell(slices, hosts, leaves, placement, "slice")
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="eckpt-scale-") as directory:
        stored = build(Path(directory), job)
        for _ in range(repeats):
            load = os.getloadavg()[0]
            found.append(_in_fresh_process(rounds.measure, job, stored) | {"load": load})
    print(f"{slices * hosts} processes, start and restore: done", file=sys.stderr)
    return middle_of(found)


def _in_fresh_process(work: Callable[[Cell, Stored], dict[str, Any]], *job: Any) -> dict[str, Any]:
    """Run ``work`` in a fresh process, so that the memory of ``work`` alone can be measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *job).result()


def medians(repeats: Sequence[Row]) -> Row:
    """Return medians of rows that differ in measured values only; else ValueError."""
    middle = {key: statistics.median(row[key] for row in repeats) for key in MEASURED}
    counted = [{k: v for k, v in row.items() if k not in MEASURED} for row in repeats]
    if any(other != counted[0] for other in counted):
        raise ValueError(f"rounds of one cell count differently: {counted}")
    return counted[0] | middle


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "processes": lambda row: f"{row['slices']} x {row['hosts']}",
    "placement": lambda row: row["placement"],
    "lost": lambda row: row["lost"],
    "place s": lambda row: f"{row['place_s']:.3g}",
    "inventories s": lambda row: f"{row['inventories_s']:.3g}",
    "manifests read": lambda row: str(row["manifests_read"]),
    "plan s": lambda row: f"{row['plan_s']:.3g}",
    "divergence s": lambda row: f"{row['divergence_s']:.3g}",
    "leader MiB": lambda row: f"{row['leader_bytes'] / 2**20:.0f}",
    "save B/process": lambda row: str(row["save_bytes_per_process"]),
    "save MB": lambda row: f"{row['save_bytes'] / 1e6:.3g}",
    "restore B/process": lambda row: str(row["restore_bytes_per_process"]),
    "restore MB": lambda row: f"{row['restore_bytes'] / 1e6:.3g}",
}


def table(rows: Iterable[Row]) -> str:
    return markdown([[*_COLUMNS], *([cell(row) for cell in _COLUMNS.values()] for row in rows)])


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
    logs = np.log([(x, max(y, 1e-9)) for x, y in points])
    return float(np.polyfit(logs[:, 0], logs[:, 1], deg=1)[0])


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


def rounds_table(jobs: Sequence[Row]) -> str:
    """Return the CPU seconds of the leader in each round, and what the service has on top."""
    names = list(jobs[0]["parts"])

    def total(job: Row, key: str) -> float:
        return sum(part[key] for part in job["parts"].values())

    figures: list[tuple[str, Callable[[Row], float]]] = [
        *((f"leader, CPU s: {name}", lambda job, n=name: _of(job, n)) for name in names),
        ("all rounds, CPU s", lambda job: total(job, "leader_cpu_s")),
        ("all rounds, by the clock", lambda job: total(job, "leader_s")),
        ("calls of the leader", lambda job: total(job, "leader_calls")),
        ("inventories, CPU s", lambda job: job["inventories_s"]),
        ("plan, CPU s", lambda job: job["plan_s"]),
        ("JAX's service: calls a process", lambda job: total(job, "calls") / job["processes"]),
        ("JAX's service: CPU s", lambda job: total(job, "service_cpu_s")),
        ("load average before", lambda job: job["load"]),
    ]
    rows = [["processes", *(f"{job['processes']:.0f}" for job in jobs)]]
    rows += [[name, *(number(figure(job)) for job in jobs)] for name, figure in figures]
    return markdown(rows)


def _of(job: Row, part: str) -> float:
    return job["parts"][part]["leader_cpu_s"]


def rounds_verdict(job: Row) -> str:
    """Return whether the leader's work in the largest job is within its limit."""
    spent_s = sum(_of(job, part) for part in job["parts"])
    spent_s += job["inventories_s"] + job["plan_s"]
    word = "met" if spent_s <= MAX_LEADER_S else "MISSED"
    what = f"leader in a start and a restore, {job['processes']:.0f} processes"
    return f"{word}: {what}: {spent_s:.4g} CPU s of {MAX_LEADER_S:g}"


if __name__ == "__main__":
    sys.exit(main())
