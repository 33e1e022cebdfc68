"""The simulation itself: equal seeds give equal traces, no seed fails, and mutants are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def simulate(*arguments: str) -> str:
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_seed_run_twice_has_one_trace() -> None:
    first = simulate("--seed", "3")
    assert "trace" in first
    assert simulate("--seed", "3") == first
    assert simulate("--seed", "5") != first


def test_simulation_of_the_first_seeds_holds(tmp_path: Path) -> None:
    told = simulate("--seeds", "40", "--workers", "1", "--out", str(tmp_path))
    assert told.startswith("40 seeds, ")
    assert " lives, 0 failed; " in told


@pytest.mark.parametrize("name", ["incarnation_ignored", "decided_before_all_ballots"])
def test_simulation_finds_a_mutant(name: str) -> None:
    assert f"{name}: found after" in simulate("--mutants", name)
