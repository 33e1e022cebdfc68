"""The scale benchmark on small jobs: bytes counted, exponents fitted, every part run."""

import json
from pathlib import Path

import pytest

from benchmarks.scale import __main__ as scale


def test_exponent_of_a_power_is_found() -> None:
    points = [(n, 3.0 * n**1.5) for n in (10, 100, 1000)]
    assert scale.exponent(points) == pytest.approx(1.5)


def test_cell_is_the_median_of_its_rounds_and_counts_must_agree() -> None:
    rounds = [dict.fromkeys(scale.MEASURED, value) | {"save_bytes": 7} for value in (3.0, 1.0, 2.0)]
    assert scale.medians(rounds) == dict.fromkeys(scale.MEASURED, 2.0) | {"save_bytes": 7}
    rounds[1]["save_bytes"] = 8
    with pytest.raises(ValueError, match="count differently"):
        scale.medians(rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_small_jobs_stay_within_their_bytes_per_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sizes", "10", "20", "--leaves", "12", "--rounds", "1"]
    assert scale.main([*flags, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert 100 < row["save_bytes_per_process"] <= 256
        assert 500 < row["restore_bytes_per_process"] <= 65_536
        assert row["restore_bytes"] > row["processes"] * 500
        fetches = row["lost"] != "nothing" or row["placement"] == "striped(2)"
        assert (row["busiest_to_mean"] is not None) == fetches
    assert "met: a process's bytes through the service per save" in out
    assert "| 2 x 5 " in out
