"""The measurement of what a save costs training, small and on CPU: that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import refusal, run_benchmark

from benchmarks import training


@pytest.mark.parametrize("slices", training.WAYS)
def test_every_way_is_measured_and_cpu_figures_called_worthless(
    tmp_path: Path, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    text = run_benchmark(
        training.__name__,
        *("--mib", "1", "--width", "64", "--tokens", "8"),
        *("--saves", "2", "--every", "10", "--slices", str(slices), "--out", str(tmp_path)),
    )
    assert "these figures mean nothing" in text
    result = json.loads((tmp_path / "training.json").read_text())
    assert set(result["ways"]) == set(training.WAYS[slices])
    assert all(len(row["inside_save"]) == 2 for row in result["ways"].values())
    assert result["link_gb_per_s"] == {}


def test_steps_after_a_save_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the steps after a save count" in refusal(training.main, ["--every", "9"], capsys)


def test_way_of_other_slices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--slices", "2", "--ways", training.ORBAX]
    assert "the ways with --slices 2" in refusal(training.main, arguments, capsys)
