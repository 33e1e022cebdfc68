"""``docs/configuration.md``, written from the table of settings and the source of ``Config``."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from pathlib import Path

from emergency_ckpt.config.settings import Config
from emergency_ckpt.config.table import Setting, settings_table
from emergency_ckpt.core.placement.policies import ALL_BUT_PRIMARY, AllButPrimary

_HEAD = """# Settings

All settings of `EmergencyCheckpointer.default_config()`, in the order of
`emergency_ckpt.config.Config`. *Tier*: the one that a setting is about; empty: both, or the job.
*Each*: the setting may differ between the processes of a job; all others must be equal, and the
start of a job compares them. Numbers are at least 0, and seconds above 0, unless the column of
types says otherwise. This page is written by
`python -m emergency_ckpt.config.document docs/configuration.md`.

"""
_COLUMNS = """| setting | type | default | tier | each | meaning |
|---|---|---|---|---|---|
"""
_INTERNAL = """
## Internal settings

These are for measurements, and their defaults are right for every job. They are taken wherever
settings are, and may go in a later version.

"""


def configuration_page() -> str:
    """Return the page as Markdown."""
    meanings = meanings_of_settings()
    lines = [(row.internal, _line(row, meanings[row.name])) for row in settings_table(Config)]
    public, internal = ("".join(line for of, line in lines if of is kind) for kind in (False, True))
    return _HEAD + _COLUMNS + public + _INTERNAL + _COLUMNS + internal


def meanings_of_settings() -> dict[str, str]:
    """Return the text below each field of ``Config``, by name, in one line each."""
    (definition,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _line(row: Setting, meaning: str) -> str:
    cells = (
        f"`{row.name}`",
        _type(row),
        _default(row.default),
        row.tier or "",
        "yes" if row.may_differ else "",
        meaning.replace("``", "`"),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _type(row: Setting) -> str:
    if row.choices:
        return ", ".join(f'`"{choice}"`' for choice in row.choices)
    if row.kind is str or (row.least is None and row.most is None):
        return f"`{row.annotation}`"
    least = f"from {row.least or 0}"
    return f"`{row.annotation}`, {least}" + ("" if row.most is None else f" to {row.most}")


def _default(value: object) -> str:
    if isinstance(value, AllButPrimary):
        value = ALL_BUT_PRIMARY
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return f"{value >> 20} MiB"
    return f"`{value!r}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page())
