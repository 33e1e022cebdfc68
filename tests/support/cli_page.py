"""``docs/reference/cli.md``, written from the parsers of ``eckpt``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from emergency_ckpt.tools.cli.main import COMMANDS

PAGE = "docs/reference/cli.md"
_HEAD = """# Command line

`eckpt COMMAND --help` prints the same. [Look at checkpoints](../inspection.md), [the
runbook](../runbook.md) and [operations](../operations.md) say when to use which. This page is
written by `python tests/support/cli_page.py`.
"""


def cli_page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(_section(name) for name in COMMANDS)


def _section(name: str) -> str:
    module = importlib.import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    lines = [f"\n## eckpt {name}\n", f"{_text(parser.description or '')}\n"]
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.dest != "help"]
        if not actions:
            continue
        if group.title not in ("options", "positional arguments"):
            lines.append(f"\n{(group.title or '').capitalize()}{_described(group)}:\n")
        lines.append("\n| option | meaning |\n|---|---|\n")
        lines += [_line(each) for each in actions]
    epilog = f"{(parser.epilog or '').strip()}\n\nexample:\n  {module.EXAMPLE}".lstrip()
    return "".join(lines) + f"\n```\n{epilog}\n```\n"


def _described(group: argparse._ArgumentGroup) -> str:  # pyright: ignore[reportPrivateUsage]
    return f" ({_text(group.description).rstrip('.')})" if group.description else ""


def _line(action: argparse.Action) -> str:
    name = action.option_strings[-1] if action.option_strings else ""
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    metavar = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
    words = [name] if action.nargs == 0 else [name, metavar]
    default = action.default
    is_shown = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    meaning = action.help or ""
    if is_shown and default != "" and "default:" not in meaning:
        meaning += f" (default: {default})"
    cells = f"`{' '.join(filter(None, words))}`", _text(meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _text(text: str) -> str:
    """Return words of a help as Markdown: options and commands are code."""
    return " ".join(text.replace("%%", "%").split()).replace("<", "&lt;")


if __name__ == "__main__":
    Path(PAGE).write_text(cli_page())
