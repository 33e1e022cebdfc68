"""The scale benchmark on small jobs: bytes counted, exponents fitted, every part run."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import rows_of

from benchmarks.common.tables import middle_of
from benchmarks.scale import __main__ as scale
from benchmarks.scale import cell

START = ["settings", "hello", "addresses", "opened", "claimed"]
RESTORE = ["report", "agree", "ready"]


def test_exponent_of_a_power_is_found() -> None:
    points = [(n, 3.0 * n**1.5) for n in (10, 100, 1000)]
    assert scale.exponent(points) == pytest.approx(1.5)


def test_cell_is_the_median_of_its_rounds_and_counts_must_agree() -> None:
    rounds = [dict.fromkeys(scale.MEASURED, value) | {"save_bytes": 7} for value in (3.0, 1.0, 2.0)]
    assert scale.medians(rounds) == dict.fromkeys(scale.MEASURED, 2.0) | {"save_bytes": 7}
    rounds[1]["save_bytes"] = 8
    with pytest.raises(ValueError, match="count differently"):
        scale.medians(rounds)


def _job(processes: int, leader_s: float) -> dict[str, Any]:
    part = {
        "leader_s": 2 * leader_s,
        "leader_cpu_s": leader_s,
        "leader_calls": 3,
        "calls": 2 * processes,
        "service_cpu_s": 0.5,
    }
    parts = dict.fromkeys(("hello", "agree"), part)
    return {
        "processes": processes,
        "parts": parts,
        "inventories_s": 0.25,
        "plan_s": 0.125,
        "load": 1.5,
    }


def test_rounds_table_adds_up_the_rounds_of_each_size() -> None:
    rows = {row[0]: row[1:] for row in rows_of(scale.rounds_table([_job(4, 0.25), _job(16, 0.5)]))}
    assert rows["processes"] == ["4", "16"]
    assert rows["leader, CPU s: agree"] == ["0.25", "0.5"]
    assert rows["all rounds, CPU s"] == ["0.5", "1"]
    assert rows["all rounds, by the clock"] == ["1", "2"]
    assert rows["calls of the leader"] == ["6", "6"]
    assert rows["JAX's service: calls a process"] == ["4", "4"]
    assert rows["JAX's service: CPU s"] == ["1", "1"]


def test_rounds_are_judged_by_the_leaders_time() -> None:
    assert scale.rounds_verdict(_job(16, 1.0)).startswith("met: rounds of a start and a restore")
    assert scale.rounds_verdict(_job(16, 1.1)).endswith("16 processes: 2.2 CPU s of 2")
    assert scale.rounds_verdict(_job(16, 1.1)).startswith("MISSED")


def test_rounds_of_a_job_are_the_median_of_each_figure() -> None:
    middle = middle_of([_job(4, value) for value in (3.0, 1.0, 2.0)])
    assert middle == _job(4, 2.0)


def test_rounds_of_a_small_job_run_over_a_real_service() -> None:
    job = scale.measure_rounds(10, leaves=6, repeats=1)
    assert job["processes"] == 20
    parts = job["parts"]
    assert list(parts) == [*START, *RESTORE]
    assert {
        name: part["calls"] for name, part in parts.items() if name in ("report", "opened")
    } == {
        "report": 2 * 20 + 3,  # the answers of 19 processes lie in three keys
        "opened": 2 * 20 + 1,
    }
    assert all(part["leader_cpu_s"] > 0 for part in parts.values())
    assert all(part["service_cpu_s"] > 0 for part in parts.values())


def test_bytes_of_a_vote_stay_within_their_limit() -> None:
    limit_bytes, *_ = scale.TARGETS["save_bytes_per_process"]
    found = cell.vote_bytes(["5e" * 32] * 1000)
    digits_of_10_000 = 3  # one in each of three keys
    assert 100 < max(found[1:]) <= limit_bytes - digits_of_10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_small_jobs_stay_within_their_bytes_per_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sizes", "10", "20", "--round-sizes", "4", "--leaves", "12", "--rounds", "1"]
    assert scale.main([*flags, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert 100 < row["save_bytes_per_process"] <= 256
        assert 500 < row["restore_bytes_per_process"] <= 65_536
        assert row["restore_bytes"] > row["processes"] * 500
    assert "met: a process's bytes through the service per save" in out
    assert "| 2 x 5 " in out
    assert "met: rounds of a start and a restore, 4 processes" in out
