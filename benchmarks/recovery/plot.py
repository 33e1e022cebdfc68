"""Recoveries as stacked bars."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.recovery.phases import NAMES, Recovery


def draw(medians: Mapping[str, Recovery], path: Path) -> None:
    """Plot one bar for each variant, with its parts in order."""
    figure = Figure(figsize=(9, 1.2 + 0.7 * len(medians)), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(medians)
    for key, name in NAMES.items():
        widths = [each.parts[key] for each in medians.values()]
        axis.barh(list(medians), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("seconds from the fault to the first step after it")
    axis.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, dpi=120)
