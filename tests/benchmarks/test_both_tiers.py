"""The measurement of saves to both tiers, small and on CPU: that it runs, and what it counts."""

from __future__ import annotations

import json

import pytest
from benchmark_runs import run_benchmark

from benchmarks.micro import both_tiers

SAVES, MIB = 3, 8


@pytest.mark.slow
def test_way_is_measured_save_by_save() -> None:
    told = run_benchmark(
        both_tiers.__name__,
        *("--platform=cpu", "--only=both tiers", "--leaves=5", f"--mib={MIB}", f"--saves={SAVES}"),
    )
    found = json.loads(told.splitlines()[-1])
    assert len(found["rows"]) == SAVES
    for row in found["rows"]:
        assert 0 < row["save"] <= row["save"] + row["step"] <= row["whole"]
        assert 0 < row["ready"] <= row["computed"], "the wait for arrays is a part of the save"
        assert row["anonymous"] > MIB << 20
        assert row["shared"] >= MIB << 20  # its slot
    assert found["from_device"] == 0  # a CPU has no transfers


def test_table_has_medians_and_the_peaks_of_both_halves() -> None:
    rows = [
        {
            **{"save": s, "computed": 5 * s, "ready": None, "step": 2 * s, "whole": 3 * s},
            **{"anonymous": a, "shared": 0, "machine": 0},
        }
        for s, a in ((0.001, 1 << 20), (0.003, 3 << 20), (0.002, 2 << 20))
    ]
    head, line = both_tiers.table({"RAM": {"rows": rows, "from_device": 5 << 20}})
    assert dict(zip(head, line, strict=True)) == {
        "": "RAM",
        "save, arrays ready, ms": "2",
        "save, arrays being computed, ms": "10",
        "of it, wait for them, ms": "-",
        "step after it, ms": "4",
        "whole, s": "0.006",
        "bytes from device, MiB": "5",
        "anonymous, MiB": "1, 3",
        "shared, MiB": "0, 0",
        "machine, MiB": "0, 0",
    }
