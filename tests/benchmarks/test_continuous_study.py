"""The study of continuous saving, small and for real. No figure is judged."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import run_benchmark

from benchmarks.continuous import study

STEPS, EVERY = 200, 20

pytestmark = pytest.mark.timeout(600)


def _study(out: Path, variants: tuple[str, ...], hosts: int) -> tuple[str, dict[str, Any]]:
    told = run_benchmark(
        "benchmarks.continuous",
        *("--hosts-per-slice", str(hosts), "--mib", "4", "--leaves", "4", "--timeout-s", "240"),
        *("--rounds", "1", "--steps", str(STEPS), "--every", str(EVERY)),
        *("--warm-up-steps", "10", "--mtbf-h", "1,24", "--training-cores", "1"),
        *("--variants", ",".join(variants), "--out", str(out), "--date", "2001-02-03"),
    )
    assert (out / "continuous.png").read_bytes().startswith(b"\x89PNG")
    return told, json.loads((out / "continuous.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "continuous", "hosts"),
    [
        (study.LOCAL_EVERY, study.LOCAL_CONTINUOUS, 1),
        # Orbax does not write arrays that one process of several holds alone.
        pytest.param(
            study.PERSISTENT_EVERY, study.PERSISTENT_CONTINUOUS, 2, marks=pytest.mark.slow
        ),
    ],
)
def test_both_ways_to_save_are_compared_with_none(
    fixed: str, continuous: str, hosts: int, tmp_path: Path
) -> None:
    text, document = _study(tmp_path, (study.OFF, fixed, continuous), hosts)
    summary = document["summary"]
    assert list(summary) == [study.OFF, fixed, continuous]
    assert summary[study.OFF]["saves"] == 0
    assert summary[fixed]["median_interval_steps"] == EVERY
    assert summary[continuous]["saves"] >= 2
    assert {(e["variant"], e["mtbf_h"]) for e in document["expected"]} == {
        (variant, mtbf_h) for variant in (fixed, continuous) for mtbf_h in (1, 24)
    }
    assert all(e["loss"]["steps"] > 0 for e in document["expected"])
    assert all(variant in text for variant in summary)
    assert document["date"] == "2001-02-03"
    assert document["settings"]["training_cores"] == 1


@pytest.mark.slow
def test_both_tiers_together_are_compared_with_orbax(tmp_path: Path) -> None:
    variants = (study.OFF, study.BOTH_CONTINUOUS, study.ORBAX_CONTINUOUS)
    _, document = _study(tmp_path, variants, 1)
    summary = document["summary"]
    assert list(summary) == list(variants)
    for variant in variants[1:]:
        assert summary[variant]["saves"] >= 2
        assert summary[variant]["lost_saves"] == 0
