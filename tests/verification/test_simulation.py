"""The simulation itself: equal seeds give equal traces, no seed fails, and mutants are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import VERIFICATION
from programs import printed

HERE = VERIFICATION / "simulation"
pytestmark = pytest.mark.timeout(300)


def simulate(*arguments: str) -> str:
    return printed(HERE / "run.py", *arguments, env={"PYTHONHASHSEED": "0"})


def test_seed_run_twice_has_one_trace() -> None:
    first = simulate("--seed", "3")
    assert "trace" in first
    assert simulate("--seed", "3") == first
    assert simulate("--seed", "5") != first


@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.core), 21])
def test_simulation_of_twenty_seeds_holds(tmp_path: Path, first: int) -> None:
    words = ["--seeds", "20", "--first", str(first), "--workers", "1", "--out", str(tmp_path)]
    told = simulate(*words)
    assert told.startswith("20 seeds, ")
    assert " lives, 0 failed; " in told


def test_seed_whose_restored_state_stayed_held_holds() -> None:
    assert "9 lives, trace" in simulate("--seed", "301748")


@pytest.mark.parametrize(
    "name",
    [pytest.param("incarnation_ignored", marks=pytest.mark.core), "decided_before_all_ballots"],
)
def test_simulation_finds_a_mutant(name: str) -> None:
    assert f"{name}: found after" in simulate("--mutants", name)
