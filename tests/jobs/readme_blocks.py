"""Code that the documents show, as it stands there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "plain_jax.py"
_DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("migrating_*.md")),
    ROOT / "docs" / "policies.md",
)


def readme_block(name: str, language: str = "python") -> str:
    """Return the lines of the one block that is fenced as ``<language> <name>``."""
    pattern = re.compile(rf"^```{language} {name}\n(.*?)^```$", re.M | re.S)
    fenced = [found for path in _DOCUMENTS for found in pattern.findall(path.read_text())]
    assert len(fenced) == 1, f"{len(fenced)} blocks are called {name!r}"
    return fenced[0]


def example_in(directory: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Write an example with directories below ``directory``, and with other changes of patterns."""
    directory.mkdir(exist_ok=True)
    lines = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    for old, new in (
        (r'"/mnt/checkpoints/\w+"', repr(str(directory / "persistent"))),
        (r'"/dev/shm/eckpt"', repr(str(directory / "ram"))),
        *changes,
    ):
        lines, count = re.subn(old, new, lines)
        assert count == 1, old
    path = directory / "train.py"
    path.write_text(lines)
    return path


def recipes_of(name: str) -> ModuleType:
    """Return an example of functions to copy, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
