"""``docs/configuration.md``, written from ``Config``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

from emergency_ckpt.config.agreement import MAY_DIFFER
from emergency_ckpt.config.settings import Config
from emergency_ckpt.core.placement.policies import ALL_BUT_PRIMARY, AllButPrimary

_HEAD = """# Settings

All settings of `EmergencyCheckpointer.default_config()`, in the order of
`emergency_ckpt.config.Config`. *Each*: the setting may differ between the processes of a job; all
others must be equal, and the start of a job compares them. This page is written by
`python -m emergency_ckpt.config.document docs/configuration.md`.

| setting | default | each | meaning |
|---|---|---|---|
"""


def configuration_page() -> str:
    """Return the page as Markdown."""
    meanings = _meanings()
    fields = [field for field in dataclasses.fields(Config) if not field.name.startswith("_")]
    return _HEAD + "".join(
        f"| `{field.name}` | {_default(field)} | {'yes' if field.name in MAY_DIFFER else ''} |"
        f" {meanings[field.name]} |\n"
        for field in fields
    )


def _default(field: dataclasses.Field[object]) -> str:
    value: object = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING
        value = field.default_factory()
    if isinstance(value, AllButPrimary):
        value = ALL_BUT_PRIMARY
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return f"{value >> 20} MiB"
    return f"`{value!r}`"


def _meanings() -> dict[str, str]:
    """Return the text of each setting, from the section of attributes in the class's docstring."""
    text = inspect.cleandoc(Config.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=  \w)", text):
        names, _, meaning = entry.strip().partition(":")
        plain = " ".join(meaning.split()).replace(" May differ.", "").replace("``", "`")
        for name in names.split(","):
            found[name.strip()] = plain.replace("|", "\\|")
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page())
