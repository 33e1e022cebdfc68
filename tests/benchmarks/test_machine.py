"""Free memory is touched before each life of a benchmark, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import machine

MIB = 1 << 20


def memory_mib(field: str) -> float:
    return int(machine._field("/proc/self/status", field).removesuffix("kB")) / 1024


@pytest.mark.parametrize(("available_mib", "touched_mib"), [(4096, 256), (128, 64), (0, 0)])
def test_free_memory_is_touched_and_given_back(
    available_mib: int, touched_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: available_mib * MIB)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mib = memory_mib("VmRSS")
    machine.touch_free_memory(256 * MIB)
    assert touched_mib - 8 <= memory_mib("VmHWM") - before_mib <= touched_mib + 8
    assert memory_mib("VmRSS") - before_mib < 8
