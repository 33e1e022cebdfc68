"""Processes that end without a close, or in the first save: ``test_kill_points.py`` has more."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import JOBS
from tiers_support import (
    LAYOUT,
    held_steps,
    open_tier,
    save_id,
    write_save,
)

from emergency_ckpt.errors import SlotBusy

PROGRAM = JOBS / "tier_process.py"


def ended(ramdisk: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", str(PROGRAM), str(ramdisk), what, ""],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_end_without_close_is_clean(ramdisk: Path) -> None:
    child = ended(ramdisk, "exit_without_close")
    assert (child.returncode, child.stderr) == (0, "")
    assert held_steps(open_tier(ramdisk)) == [1]


def test_kill_in_the_first_save_leaves_an_empty_tier(ramdisk: Path) -> None:
    child = ended(ramdisk, "die_before_publishing")
    assert child.returncode == -signal.SIGKILL, child.stderr
    again = open_tier(ramdisk)
    assert again.held() == ((), (), None)
    again.reserve(LAYOUT.size_bytes)
    again.protect([save_id(1), save_id(2)])
    write_save(again, 1)
    write_save(again, 2)
    with pytest.raises(SlotBusy):
        write_save(again, 3)
