"""Plot of the comparison: the main times of each job, on a logarithmic axis."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common.job import Shape
from benchmarks.compare.targets import Summaries

_ROWS = {
    "stall": "stall",
    "published": "published in RAM",
    "restore_nothing_lost": "restore, nothing lost",
    "restore_lost_slice": "restore, slice lost",
    "restore_lost_halves": "restore, half-lost slices",
    "storage_save": "save to storage",
    "storage_restore": "restore from storage",
}
_BAR = 0.8


def draw(jobs: Sequence[tuple[Shape, Summaries]], path: Path) -> None:
    """Plot medians as bars, with minimum and maximum over the rounds; no bar without a figure."""
    figure = Figure(figsize=(5.5 * len(jobs), 5), layout="constrained")
    axes = figure.subplots(1, len(jobs), squeeze=False)[0]
    for axis, (shape, summaries) in zip(axes, jobs, strict=True):
        height = _BAR / len(summaries)
        for number, (name, summary) in enumerate(summaries.items()):
            bars = [
                (row, summary[key])
                for row, key in enumerate(_ROWS)
                if summary[key]["median"] is not None
            ]
            axis.barh(
                [row + number * height for row, _ in bars],
                [value["median"] for _, value in bars],
                height,
                xerr=[
                    [value["median"] - value["min"] for _, value in bars],
                    [value["max"] - value["median"] for _, value in bars],
                ],
                label=name,
            )
        axis.set_yticks([row + (_BAR - height) / 2 for row in range(len(_ROWS))], _ROWS.values())
        axis.invert_yaxis()  # in the order of the table
        axis.set(xscale="log", xlabel="seconds", title=f"job {shape.name}")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)
