"""Tables and faults for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from emergency_ckpt.core.wording import printable, size_text
from emergency_ckpt.tools.cli.output import print_line
from emergency_ckpt.tools.survey.places import SurveyFault


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their columns."""
    lines = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for row in lines:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def print_faults(faults: Sequence[SurveyFault]) -> None:
    """Print one line for each fault to the standard error."""
    for fault in faults:
        hint = f"; {fault.hint}" if fault.hint else ""
        print_line(f"{fault.where}: {fault.problem}{hint}", sys.stderr)


def size(size_bytes: int | None) -> str:
    """Return a size with a unit; ``-`` when it is not known."""
    return "-" if size_bytes is None else size_text(size_bytes)


def age(age_s: float | None) -> str:
    """Return a time with a unit; ``-`` when it is not known."""
    if age_s is None:
        return "-"
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if age_s >= unit_s:
            return f"{age_s / unit_s:.1f}{unit}"
    return f"{max(age_s, 0):.0f}s"
