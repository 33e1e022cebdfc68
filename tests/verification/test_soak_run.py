"""A few incidents of the soak, by its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import VERIFICATION

SOAK = VERIFICATION / "soak" / "soak.py"


@pytest.mark.slow
def test_soak_recovers_and_says_which_seeds(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--seed", "1", "--only", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    lines = [json.loads(each) for each in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [line["incident"] for line in lines] == [0, 1, 2]
    assert {line["seed"] for line in lines} == {1}
    assert all(line["kinds"] for line in lines)
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["failures"] == []
    assert figures["incidents"] == 3
    assert done.returncode == 0, done.stderr
