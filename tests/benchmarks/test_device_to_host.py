"""The measurement of device to host, small and on CPU: that it runs, and says what it is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import refusal, run_benchmark

from benchmarks.micro import device_to_host

ROUNDS = 2


@pytest.mark.slow
def test_every_way_is_measured_and_cpu_figures_called_worthless(tmp_path: Path) -> None:
    text = run_benchmark(
        device_to_host.__name__,
        *("--platform", "cpu", "--mib", "8", "--leaves", "5", "--rounds", str(ROUNDS)),
        *("--staging-mib", "3", "--device-copy-mib", "4", "--out", str(tmp_path)),
    )
    result = json.loads((tmp_path / "device_to_host.json").read_text())
    assert result["absent"] == {device_to_host.PLAIN: "no GPU"}
    rates = result["bandwidth_gb_per_s"]
    assert set(rates) == {
        device_to_host.DEVICE_PUT,
        device_to_host.OWN_WAY,
        device_to_host.STAGED,
        device_to_host.AT_ONCE,
    }
    for rows in (rates, *result["seconds"].values()):
        for values in rows.values():
            assert len(values) == ROUNDS
            assert min(values) > 0
    common = [device_to_host.STALL, "step after it", "until whole", device_to_host.COMPUTED]
    for name, rows in result["seconds"].items():
        told = [] if name == device_to_host.ORBAX else [device_to_host.READY]
        assert list(rows) == [*common, *told]
        for ready_s, all_s in zip(
            rows.get(device_to_host.READY, []), rows[device_to_host.COMPUTED], strict=bool(told)
        ):
            assert ready_s <= all_s, "the wait for arrays is a part of the save"
    assert list(result["seconds"]) == [
        device_to_host.WAIT,
        device_to_host.DEVICE_COPY,
        device_to_host.ORBAX,
    ]
    assert "these figures mean nothing" in text
    for name in [*rates, *result["absent"], *result["seconds"]]:
        assert f"  {name} " in text


def test_leaf_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mib", "1", "--leaves", str(2**20)]
    assert "at least one value" in refusal(device_to_host.main, arguments, capsys)
