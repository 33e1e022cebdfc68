"""The cost of a ramdisk's pages, on a file of a few MiB."""

from pathlib import Path

import pytest
from benchmark_runs import refusal

from benchmarks.micro import pages


def test_each_cost_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--ramdisk", str(tmp_path), "--mib", "4", "--idle-s", "0.01"]) == 0
    text = capsys.readouterr().out
    found = pages.measure(tmp_path, 4 << 20)
    assert len(found) == 8
    for name, seconds in found.items():
        assert name in text
        assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_ramdisk_without_room_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ramdisk", "/dev/shm", "--mib", str(1 << 30)]
    assert "choose a smaller state" in refusal(pages.main, arguments, capsys)
