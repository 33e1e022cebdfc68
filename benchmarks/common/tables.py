"""Tables in Markdown and the figures in them. Pure."""

from collections.abc import Sequence


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
