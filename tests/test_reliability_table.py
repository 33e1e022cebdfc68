"""Every test that ``docs/reliability.md`` names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and "tests/" in line
]


@pytest.mark.parametrize("row", ROWS, ids=[row[2:42] for row in ROWS])
def test_reliability_row_names_tests_that_exist(row: str) -> None:
    tests = row.split("|")[-2]
    files = re.findall(r"`(tests/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", tests)
    assert files
    for file, names in files:
        text = (ROOT / file).read_text()
        for name in re.findall(r"\w+", names):
            assert f"def {name}(" in text, f"{file} has no {name}"
