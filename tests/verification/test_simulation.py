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


@pytest.mark.core
def test_simulation_of_the_first_seeds_holds(tmp_path: Path) -> None:
    told = simulate("--seeds", "40", "--workers", "1", "--out", str(tmp_path))
    assert told.startswith("40 seeds, ")
    assert " lives, 0 failed; " in told


def test_seed_whose_restored_state_stayed_held_holds() -> None:
    assert "9 lives, trace" in simulate("--seed", "301748")


@pytest.mark.core
@pytest.mark.parametrize("name", ["incarnation_ignored", "decided_before_all_ballots"])
def test_simulation_finds_a_mutant(name: str) -> None:
    assert f"{name}: found after" in simulate("--mutants", name)
