"""``docs/configuration.md`` and ``config/keywords.py``, written from the table of settings."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path

from emergency_ckpt.config.settings import Config
from emergency_ckpt.config.table import Setting, settings_table
from emergency_ckpt.core.placement import ALL_BUT_PRIMARY, AllButPrimary

_HEAD = """# Settings

All settings of `EmergencyCheckpointer.default_config()`: [those of most jobs](#basic-settings),
then [all others](#advanced-settings). A setting with `yes` in the column *may differ* may differ
between the processes of a job. All other settings must be equal, and the start of a job compares
these settings. Seconds are above 0; other numbers are at least 0, unless the column of types says
otherwise. This page is written by
`python tests/support/settings_page.py`.

"""
_BASIC = """## Basic settings

A job needs `local_dir`, and `dir` or `run_id`. On a cluster, `secret_file` or ECKPT_SECRET should
give a secret.

"""
_ADVANCED = """
## Advanced settings

Their defaults are right for most jobs. Sizes of buffers, threads and priorities are no settings:
they follow from the machine.

"""
_LIMITS = """
## Time limits

The table shows the limits that follow from `stall_timeout_s`.

| what waits | limit |
|---|---|
| a restore or a save to storage in which no byte moves | `stall_timeout_s` |
| a wait for a late process, for a `set_state` or for one call to storage | ten times as long |
| a start; a save to RAM that waits for other processes or for the previous save | twice as long |
| the saves in progress when an exception leaves the `with` block | half of `stall_timeout_s` |
| a silent peer, after which a restore asks other holders | half as long, at most 30 s |
"""
_COLUMNS = """| setting | type | default | may differ | meaning |
|---|---|---|---|---|
"""
PAGE, KEYWORDS = "docs/configuration.md", "emergency_ckpt/config/keywords.py"

_KEYWORDS_HEAD = '''\
"""The settings as keywords, for type checkers; tests/support/settings_page.py writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence

    import jax

    from emergency_ckpt.config.policies import PreservationPolicy, SaveEvery
    from emergency_ckpt.core.placement import PlacementPolicy
    from emergency_ckpt.core.save.save_rules import NonFinite
    from emergency_ckpt.core.save.snapshot_plan import DeviceReads
    from emergency_ckpt.observer import OnEvent
    from emergency_ckpt.types import HostStateRemap, OnPreemption, Requirement


class Settings(TypedDict, total=False):
    """Keywords of ``EmergencyCheckpointer`` and ``Config.set``; ``Config`` has the meanings."""

'''
_ALSO_TAKEN = {
    **dict.fromkeys(("dir", "local_dir", "secret_file"), "os.PathLike[str]"),
    "placement": "str",
}
"""Types that a setting is taken in besides its own."""
_SHOWN_AS = {"SaveEvery": "`int`, `datetime.timedelta`, a policy, or a list of these"}
"""Types whose name says too little."""


def keywords_module() -> str:
    """Return the source of ``config.keywords``."""
    lines: list[str] = []
    for row in settings_table(Config):
        also = f"{_ALSO_TAKEN[row.name]} | " if row.name in _ALSO_TAKEN else ""
        lines.append(f"    {row.name}: {also}{row.annotation}\n")
    return _KEYWORDS_HEAD + "".join(lines)


def configuration_page() -> str:
    """Return the page as Markdown."""
    meanings = meanings_of_settings()
    lines = [(row.basic, _line(row, meanings[row.name])) for row in settings_table(Config)]
    basic, advanced = ("".join(line for of, line in lines if of is kind) for kind in (True, False))
    return _HEAD + _BASIC + _COLUMNS + basic + _ADVANCED + _COLUMNS + advanced + _LIMITS


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
        "yes" if row.may_differ else "",
        meaning.replace("``", "`"),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _type(row: Setting) -> str:
    if row.choices:
        names = ", ".join(f'`"{choice}"`' for choice in row.choices)
        return f"any of {names}" if row.is_collection else names
    if row.annotation in _SHOWN_AS:
        return _SHOWN_AS[row.annotation]
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
    Path(PAGE).write_text(configuration_page())
    Path(KEYWORDS).write_text(keywords_module())
