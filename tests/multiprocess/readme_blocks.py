"""The quick starts of the README, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def readme_block(name: str, language: str = "python") -> str:
    """The lines of the one code block that is fenced as ``python <name>``."""
    fenced = re.findall(rf"^```{language} {name}\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert len(fenced) == 1, f"{len(fenced)} blocks are called {name!r}"
    return fenced[0]
