"""Continuous saving with a limit on the steps kept: saves and removals do not mind each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import printed_beside_bucket
from saves_and_removals_program import KEPT, save_and_remove


def check(outcome: dict[str, Any], saves: int) -> None:
    assert outcome["failed"] == []
    assert outcome["failures"] == 0
    assert outcome["steps"] == list(range(saves - KEPT + 1, saves + 1))
    assert outcome["removed"] == saves - KEPT


def run_on_gcs(saves: int) -> dict[str, Any]:
    return printed_beside_bucket("saves_and_removals_program.py", "gs://bucket/run", str(saves))


@pytest.mark.dear
def test_saves_in_a_directory_with_removals_all_succeed(tmp_path: Path) -> None:
    check(save_and_remove(str(tmp_path / "run"), str(tmp_path / "ram"), 30), 30)


@pytest.mark.timeout(600)
def test_saves_in_a_bucket_with_removals_all_succeed() -> None:
    check(run_on_gcs(12), 12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_saves_in_a_bucket_with_removals_all_succeed() -> None:
    check(run_on_gcs(400), 400)
