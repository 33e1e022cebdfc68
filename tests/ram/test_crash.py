"""SIGKILL of a real process at every point of a save: what was whole before is whole after."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import JOBS
from tiers_support import (
    LAYOUT,
    assert_whole,
    complete_save,
    document,
    files_of,
    held_steps,
    open_tier,
    save_id,
    write_save,
)

from emergency_ckpt.errors import SlotBusy
from emergency_ckpt.ram import LocalTier

PROGRAM = JOBS / "tier_process.py"
BEFORE_PUBLISH = ["invalidated", "half_copied", "copied", "staged"]
AFTER_PUBLISH = ["published", "host_state_published", "complete"]


def killed_at(ramdisk: Path, point: str) -> None:
    child = subprocess.run(
        [sys.executable, str(PROGRAM), str(ramdisk), "save", point],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr


@pytest.mark.parametrize("point", BEFORE_PUBLISH + AFTER_PUBLISH)
def test_kill_leaves_the_previous_save_whole(ramdisk: Path, tier: LocalTier, point: str) -> None:
    digest = complete_save(tier, 1)
    write_save(tier, 0)  # an old save in the slot that will be written
    tier.publish_host_state(save_id(1), 0, 4, document(1))
    tier.close()

    killed_at(ramdisk, point)

    again = open_tier(ramdisk)
    assert again.quarantined == ()
    published = point in AFTER_PUBLISH
    assert held_steps(again) == ([1, 2] if published else [1])
    assert_whole(again, digest, 1)
    if published:
        newest = next(held for held in again.held()[0] if held.save.step == 2)
        assert_whole(again, newest.digest, 2)
    host_steps = [held.save.step for held in again.held()[1]]
    assert host_steps == ([1, 2] if point in AFTER_PUBLISH[1:] else [1])
    assert again.held()[2] == save_id(2 if point == "complete" else 1)
    assert not any(name.startswith(".tmp") for name in files_of(again))
    again.protect([save_id(1)])
    del digest
    _save_again(again)


def _save_again(tier: LocalTier) -> None:
    """The life after saves as if nothing had happened, in the same two slots."""
    digest = write_save(tier, 3)
    assert_whole(tier, digest, 3)
    assert {name for name in files_of(tier) if name.endswith(".bin")} == {
        "slot_0.bin",
        "slot_1.bin",
    }


def test_end_without_close_is_clean(ramdisk: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-X", "dev", str(PROGRAM), str(ramdisk), "exit_without_close", ""],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    again = open_tier(ramdisk)
    assert held_steps(again) == [1]


def test_kill_in_the_first_save_leaves_an_empty_tier(ramdisk: Path) -> None:
    killed_at(ramdisk, "staged")
    again = open_tier(ramdisk)
    assert again.held() == ((), (), None)
    again.reserve(LAYOUT.size_bytes)
    again.protect([save_id(1), save_id(2)])
    write_save(again, 1)
    write_save(again, 2)
    with pytest.raises(SlotBusy):
        write_save(again, 3)
