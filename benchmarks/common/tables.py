"""Tables in Markdown, and the figures in them. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float) -> str:
    """Return ``value`` with three significant digits and without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 1e-3 or value == 0 else f"{value:.4f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header row; the first column is left-aligned, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *(line(row) for row in rows[1:])])


def middle_of(records: Sequence[Any]) -> Any:
    """Return the median of each number of records that have the same keys."""
    if isinstance(records[0], Mapping):
        return {key: middle_of([record[key] for record in records]) for key in records[0]}
    return statistics.median(records)
