"""Tables and faults for people: with lines on a terminal that rich draws, else as plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from emergency_ckpt.core.wording import printable, size_text
from emergency_ckpt.tools.cli.output import HAS_RICH, print_line
from emergency_ckpt.tools.survey.places import SurveyFault


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their columns. Text elsewhere than on a terminal is never cut."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and HAS_RICH:
        _print_rich(columns, rows)
        return
    widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
    for row in [list(columns), *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    # Imported here: a program that reads the output does without.
    from rich import box  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


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
