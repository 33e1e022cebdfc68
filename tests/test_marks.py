"""What gives a test the mark ``process``, and the two limits of a test without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from file_costs import Cost, grown
from looks import tree_of
from process_starts import way_to_a_start
from programs import ended, printed
from running_jobs import run_life


def by_itself() -> None:
    subprocess.run(["true"], check=True)


def by_a_helper() -> None:
    by_itself()


def by_a_module() -> None:
    printed("-V")


def by_modules_of_modules() -> object:
    return run_life


class ByAMethod:
    def method(self) -> None:
        by_a_module()


def names_a_type_only(done: subprocess.CompletedProcess[str]) -> int:
    return done.returncode


def names_what_stands_beside_a_start() -> object:
    return tree_of(Path("nowhere"))


@pytest.mark.parametrize(
    "name",
    ["by_itself", "by_a_helper", "by_a_module", "by_modules_of_modules", "ByAMethod", "gcs"],
)
def test_start_is_found_however_it_is_named(name: str) -> None:
    assert way_to_a_start(Path(__file__), [name]) is not None


@pytest.mark.parametrize(
    "name", ["names_a_type_only", "names_what_stands_beside_a_start", "world", "ramdisk"]
)
def test_what_starts_nothing_is_not_marked(name: str) -> None:
    assert way_to_a_start(Path(__file__), [name]) is None


def test_way_to_a_start_names_each_step() -> None:
    way = way_to_a_start(Path(__file__), ["by_a_helper"])
    assert way == "tests/test_marks.py: by_a_helper, tests/test_marks.py: by_itself, subprocess.run"


TESTS_WITH_COSTS = """
import os, time
import pytest

def spin():
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    spin()

@pytest.fixture
def own():
    spin()

def test_spins(): spin()
def test_own_fixture_spins(own): pass
def test_starts(): os.system("true")
def test_shared_fixture_spins(shared): pass
def test_sleeps(): time.sleep(0.6)
@pytest.mark.process
def test_marked(): spin(); os.system("true")
@pytest.mark.slow
def test_slow(): spin()
@pytest.mark.dear
def test_dear(): spin()
"""

RUN = """
import sys, pytest
from file_costs import FileCosts
sys.exit(pytest.main(["-rA", "-p", "no:cacheprovider", sys.argv[1]], [FileCosts(None, 0.5)]))
"""


def test_unmarked_test_that_is_dear_or_starts_a_process_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_costs.py"
    file.write_text(TESTS_WITH_COSTS)
    told = ended("-c", RUN, file).stdout
    outcomes = {
        line.split("::")[1].split()[0]: line.split()[0]
        for line in told.splitlines()
        if line.startswith(("PASSED ", "FAILED "))
    }
    assert outcomes == {
        "test_spins": "FAILED",
        "test_own_fixture_spins": "FAILED",
        "test_starts": "FAILED",
        "test_shared_fixture_spins": "PASSED",
        "test_sleeps": "PASSED",
        "test_marked": "PASSED",
        "test_slow": "PASSED",
        "test_dear": "PASSED",
    }, told


def test_growth_is_told_beside_that_of_all_files() -> None:
    before = {name: Cost(10.0, 12.0) for name in ("a", "b", "c", "gone")} | {"d": Cost(0.1, 0.1)}
    now = {
        "a": Cost(20.0, 22.0),  # the machine is twice as slow
        "b": Cost(23.0, 25.0),
        "c": Cost(26.0, 30.0),
        "d": Cost(1.0, 1.0),
        "new": Cost(3.0, 3.0),
    }
    assert grown(now, before | {"e": Cost(10.0, 10.0)}) == [
        "new: 0.0 s before, now 3.0 s of CPU",
    ]
    steady = {**now, "a": Cost(10.0, 12.0), "b": Cost(10.0, 12.0)}
    assert grown(steady, before) == [
        "c: 10.0 s before, now 26.0 s of CPU",
        "new: 0.0 s before, now 3.0 s of CPU",
    ]
