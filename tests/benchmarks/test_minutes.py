"""The benchmark of minutes to so many steps: its failures, its interval, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import ROOT, minutes


@pytest.mark.parametrize("seed", range(20))
def test_failures_are_100_to_300_steps_apart_and_of_the_seed(seed: int) -> None:
    found = minutes.failures(seed, 2000)
    assert found == minutes.failures(seed, 2000)
    steps = [0, *(fault.step for fault in found)]
    assert all(minutes.NEAREST <= b - a <= minutes.FARTHEST for a, b in pairwise(steps))
    assert 2000 - minutes.FARTHEST <= steps[-1] < 2000


@pytest.mark.parametrize(
    ("cost_s", "between_s", "step_s", "expected"), [(0.0, 10, 0.1, 1), (0.05, 10, 0.1, 10)]
)
def test_best_interval_is_youngs(
    cost_s: float, between_s: float, step_s: float, expected: int
) -> None:
    assert minutes.best_interval(cost_s, between_s, step_s) == expected


@pytest.mark.slow
def test_short_job_with_a_failure_comes_to_its_end(tmp_path: Path) -> None:
    out = os.path.relpath(tmp_path, ROOT)  # as the default one
    options = ["--steps", "320", "--measured-steps", "20", "--contenders", "ours", "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.minutes", *options],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "minutes.json").read_text())
    undisturbed, ours = found["outcomes"]
    assert (undisturbed["lives"], undisturbed["trained"]) == (1, 320)
    assert ours["lives"] == len(found["faults"]) + 1 > 1
    assert ours["trained"] >= 320
