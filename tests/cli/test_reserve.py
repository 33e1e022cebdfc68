"""``eckpt doctor --reserve``: slots for a host that has none, of the size that the options tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from looks import eckpt_here
from tiers_support import RUN_ID, assert_whole, complete_save, open_tier, slot_files

MIB = 1 << 20


def _reserve(ramdisk: Path, *options: str) -> int:
    return eckpt_here("doctor", "--reserve", "--local-dir", ramdisk, "--run-id", RUN_ID, *options)


def test_each_process_of_the_host_gets_a_slot(
    ramdisk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--state-gib", str(3 / 1024), "--hosts-per-slice", "3", "--processes", "2")
    assert _reserve(ramdisk, *size) == 0
    found = sorted((ramdisk / RUN_ID).rglob("slot_0.bin"))
    assert [path.parent.name for path in found] == ["process_00000", "process_00001"]
    assert {path.stat().st_blocks * 512 for path in found} == {MIB}
    assert "reserved 1 MiB" in capsys.readouterr().out.replace("1.0", "1")
    tiers = [open_tier(ramdisk, process_index=index) for index in (6, 7)]
    assert [slot_files(tier) for tier in tiers] == [{"slot_0.bin"}] * 2, "also under other indices"
    for tier in tiers:
        assert_whole(tier, complete_save(tier, 1), 1)
        tier.close()
    assert _reserve(ramdisk, *size) == 0
    assert "nothing to reserve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give --state-gib"),
        (("--state-gib", "0"), "above 0"),
        (("--state-gib", "1", "--processes", "0"), "at least 1"),
        (("--state-gib", "1", "--placement", "none"), "placement"),
    ],
)
def test_size_that_is_not_told_is_an_error(
    ramdisk: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert _reserve(ramdisk, *options) == 2
    assert said in capsys.readouterr().err
    assert not (ramdisk / RUN_ID).exists()


def test_empty_storage_tells_no_size(
    ramdisk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _reserve(ramdisk, "--dir", str(tmp_path)) == 2
    assert "give --state-gib" in capsys.readouterr().err
