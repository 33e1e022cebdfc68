"""Comparison of the settings of all processes of a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MOST_NAMED = 8


def differing_settings(tables: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each setting that differs: its name, each value, and its processes.

    ``tables``: by process, the text of each setting that must agree. "Not known" counts as a
    value.
    """
    names = sorted({name for table in tables.values() for name in table})
    lines: list[str] = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, table in sorted(tables.items()):
            holders.setdefault(table.get(name, "not known there"), []).append(process)
        if len(holders) > 1:
            values = "; ".join(f"{value} at {_named(who)}" for value, who in holders.items())
            lines.append(f"{name} differs between the processes: {values}")
    return lines


def _named(processes: Sequence[int]) -> str:
    named = ", ".join(map(str, processes[:_MOST_NAMED]))
    more = len(processes) - _MOST_NAMED
    text = f"process {named}" if len(processes) == 1 else f"processes {named}"
    return f"{text} and {more} more" if more > 0 else text
