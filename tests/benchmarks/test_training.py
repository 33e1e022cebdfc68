"""The measurement of what a save costs training, small and on CPU: that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import refusal, run_benchmark

from benchmarks import training


def test_every_way_is_measured_and_cpu_figures_called_worthless(tmp_path: Path) -> None:
    text = run_benchmark(
        training.__name__,
        *("--platform", "cpu", "--mib", "1", "--width", "64", "--tokens", "8"),
        *("--saves", "2", "--every", "10", "--out", str(tmp_path)),
    )
    assert "these figures mean nothing" in text
    result = json.loads((tmp_path / "training.json").read_text())
    assert set(result["ways"]) == set(training.WAYS)
    assert all(len(row["inside_save"]) == 2 for row in result["ways"].values())
    assert result["link_gb_per_s"] == {}


def test_steps_after_a_save_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the steps after a save count" in refusal(training.main, ["--every", "9"], capsys)
