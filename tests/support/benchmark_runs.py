"""Benchmarks run as a user runs them, and the tables that they print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from places import ROOT


def run_benchmark(module: str, *arguments: str) -> str:
    """Run a benchmark's program, which must succeed; return what it printed."""
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=580, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def refusal(
    main: Callable[[list[str]], object], arguments: Sequence[str], told: pytest.CaptureFixture[str]
) -> str:
    """Return what a program says that refuses its arguments before it starts."""
    with pytest.raises(SystemExit) as refused:
        main(list(arguments))
    assert refused.value.code == 2
    return told.readouterr().err


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each line of a Markdown table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
