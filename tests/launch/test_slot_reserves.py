"""The slot that a host without one gets while its process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_support import MakeSpec, ProcessSet, wait_until

from emergency_ckpt.tools.launch.ramdisks import lost_slots

SIZE_BYTES = 3 << 20


def _hold(ramdisk: Path, run_id: str = "run", size_bytes: int = SIZE_BYTES) -> Path:
    directory = ramdisk / run_id / "process_00007"
    directory.mkdir(mode=0o700, parents=True)
    (directory / "slot_1.bin").write_bytes(bytes(size_bytes))
    return directory


def test_newest_run_and_its_largest_slot_are_wanted() -> None:
    found = {
        0: {"old": (1.0, 900), "new": (5.0, 100)},
        1: {},
        2: {"new": (4.0, 120)},
        3: {"old": (2.0, 900)},
    }
    assert lost_slots(found) == {1: ("new", 120), 3: ("new", 120)}
    assert lost_slots({0: {}, 1: {}}) == {}
    assert lost_slots({}) == {}


def test_lost_host_gets_a_slot_of_the_others_size(make_spec: MakeSpec) -> None:
    spec = make_spec("time.sleep(600)")
    held = _hold(spec.ramdisk(0))
    made = spec.ramdisk(1) / "run" / "process_00001" / "slot_0.bin"
    with ProcessSet(spec, restart_count=1):
        wait_until(lambda: made.exists() and made.stat().st_size == SIZE_BYTES, "it is made")
    assert [path.name for path in held.iterdir()] == ["slot_1.bin"], "it has lost nothing"
    assert not list(made.parent.glob(".tmp-*"))


@pytest.mark.parametrize("restart_count", [0, 1])
def test_no_slot_without_a_loss_or_an_earlier_life(make_spec: MakeSpec, restart_count: int) -> None:
    spec = make_spec("")
    if restart_count == 0:
        _hold(spec.ramdisk(0))  # of a job before this one, perhaps of another size
    else:
        _hold(spec.ramdisk(0))
        _hold(spec.ramdisk(1))
    with ProcessSet(spec, restart_count=restart_count) as processes:
        processes.wait(60)
    assert not list(spec.local_root.rglob("slot_0.bin"))


def test_ramdisk_that_cannot_be_used_disturbs_no_process(make_spec: MakeSpec) -> None:
    spec = make_spec("")
    _hold(spec.ramdisk(0))
    spec.ramdisk(1).mkdir(mode=0o700, parents=True)
    (spec.ramdisk(1) / "run").write_text("a file")
    with ProcessSet(spec, restart_count=1) as processes:
        assert [each.returncode for each in processes.wait(60)] == [0, 0]
