"""Every test and every commit that ``docs/reliability.md`` names exists.

Commits are looked for in the history of the checkout. Where there is none (no git, an archive, a
shallow clone) the tests of commits are skipped.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
COLUMNS = ["what went wrong, and why", "introduced by", "mended in", "found by", "tests"]
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and re.search("`(tests|verification)/", line)
]
DEFECTS = [row for row in ROWS if row.count(" | ") > 1]
COMMIT = re.compile(r"`([0-9a-f]{7})`")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


@functools.cache
def history() -> frozenset[str] | None:
    """Return the first 7 digits of each commit before this one; None where not all are here."""
    if shutil.which("git") is None:
        return None

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    top = ask("rev-parse", "--show-toplevel")
    if (
        not top
        or Path(top).resolve() != ROOT
        or ask("rev-parse", "--is-shallow-repository") != "false"
    ):
        return None
    return frozenset(commit[:7] for commit in ask("rev-list", "HEAD").split())


@pytest.mark.parametrize("row", ROWS, ids=[row[2:42] for row in ROWS])
def test_reliability_row_names_tests_that_exist(row: str) -> None:
    files = re.findall(
        r"`((?:tests|verification)/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", cells(row)[-1]
    )
    assert files
    for file, names in files:
        text = (ROOT / file).read_text()
        for name in re.findall(r"\w+", names):
            assert f"def {name}(" in text, f"{file} has no {name}"


@pytest.mark.parametrize("row", DEFECTS, ids=[row[2:42] for row in DEFECTS])
def test_reliability_row_names_both_commits(row: str) -> None:
    found = dict(zip(COLUMNS, cells(row), strict=True))
    assert COMMIT.search(found["introduced by"])
    assert re.fullmatch(r"`[0-9a-f]{7}`(, `[0-9a-f]{7}`)*", found["mended in"])


def test_reliability_tables_of_defects_have_the_columns() -> None:
    heads = [line for line in PAGE.splitlines() if line.startswith("| what went wrong")]
    assert heads
    assert [cells(head) for head in heads] == [COLUMNS] * len(heads)


@pytest.mark.slow  # a copy whose history was rewritten is still whole
def test_reliability_commits_are_in_history_if_there_is_one() -> None:
    known = history()
    if known is None:
        pytest.skip("no git, no checkout of git, or a shallow one")
    assert [each for each in sorted(set(COMMIT.findall(PAGE))) if each not in known] == []
