"""Each operation on storage beside each second actor: `verification/README.md` says what it shows.

Of all cases a fixed choice; `make explore` goes through all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "verification" / "explorer" / "run.py"

pytestmark = pytest.mark.timeout(900)


def explored(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Return what came of the cases. Fails with those that failed, and the commands for these."""
    told = tmp_path / "cases.json"
    program = [sys.executable, str(PROGRAM), "--json", str(told), *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return json.loads(told.read_text())


def check(cases: list[dict[str, Any]], at_least: int) -> None:
    assert len(cases) >= at_least
    assert {case["is_reached"] for case in cases} == {False, True}


@pytest.mark.core
def test_each_fifth_pair_on_a_disk_spoils_nothing(tmp_path: Path) -> None:
    cases = explored(tmp_path, "--place", "disk", "--choose", "5")
    check(cases, 30)
    assert len({case["operation"] for case in cases}) == 13
    assert len({case["actor"] for case in cases}) == 13


@pytest.mark.slow
def test_all_pairs_on_a_disk_spoil_nothing(tmp_path: Path) -> None:
    check(explored(tmp_path, "--place", "disk", "--every", "41"), 300)


def test_overtaken_changes_of_a_bucket_spoil_nothing(tmp_path: Path) -> None:
    """Those that have lost steps before, at each 23rd request; a nightly test has all pairs."""
    operations = ("remove", "clean_up", "save_again", "roll_back", "save_over_hidden")
    actors = ("nobody", "newer_life", "newer_life_dies")
    words = [word for each in operations for word in ("--operation", each)]
    words += [word for each in actors for word in ("--actor", each)]
    check(explored(tmp_path, "--place", "bucket", "--every", "23", *words), 30)


@pytest.mark.timeout(180)
def test_drain_from_storage_that_gives_no_answer_has_an_end(tmp_path: Path) -> None:
    """Whatever it asks for: the log, the structure of the newest step, a place for its files."""
    words = ("--place", "disk", "--operation", "drain", "--actor", "late_answer", "--every", "9")
    check(explored(tmp_path, *words), 12)


@pytest.mark.slow
def test_all_pairs_in_a_bucket_spoil_nothing(tmp_path: Path) -> None:
    check(explored(tmp_path, "--place", "bucket", "--every", "37"), 300)


@pytest.mark.parametrize(
    ("place", "operation", "actor", "mutant"),
    [
        ("bucket", "remove", "newer_life", "no_look_at_the_log_after_the_listing"),
        ("bucket", "remove", "newer_life", "object_of_another_generation_deleted"),
        ("bucket", "save_over_hidden", "newer_life_dies", "commit_not_taken_back"),
        ("bucket", "save", "newer_life", "objects_written_without_their_generation"),
        ("disk", "remove", "newer_life", "no_look_at_the_log_after_the_listing"),
        ("disk", "drain", "newer_life", "drain_without_a_look_before_the_commit"),
    ],
)
@pytest.mark.slow
def test_known_defect_is_found(place: str, operation: str, actor: str, mutant: str) -> None:
    words = ["--place", place, "--operation", operation, "--actor", actor, "--mutant", mutant]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"--operation {operation} --actor {actor} --place {place} --k" in done.stdout
