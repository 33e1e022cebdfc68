"""Files of slots that are cut under a process: it dies of the signal, and says of what."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import JOBS
from tiers_support import LAYOUT, complete_save, open_tier

PROGRAM = JOBS / "cut_program.py"
LINE = "emergency_ckpt: SIGBUS in a mapped slot of the ramdisk: its file was made shorter"


@pytest.mark.parametrize("faulthandler", ["no", "before", "after"])
def test_read_of_lent_memory_after_a_cut_says_why(ramdisk: Path, faulthandler: str) -> None:
    child = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(ramdisk), faulthandler],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    os.truncate(child.stdout.readline().strip(), 0)
    printed, said = child.communicate("read\n", timeout=120)
    assert printed == ""
    assert child.returncode == -signal.SIGBUS
    assert said.count(LINE) == 1
    assert ("Fatal Python error: Bus error" in said) is (faulthandler != "no")


def test_slot_of_a_tmpfs_is_closed_to_others_and_unsealed(ramdisk: Path) -> None:
    """A seal against truncation cannot be had: the kernel gives it to memfds alone."""
    tier = open_tier(ramdisk)
    tier.reserve(LAYOUT.size_bytes)
    complete_save(tier, 1)
    slot = tier.path / "slot_0.bin"
    assert slot.stat().st_mode & 0o777 == 0o600
    assert slot.stat().st_uid == os.geteuid()
    fd = os.open(slot, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="Operation not permitted") as refused:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert refused.value.errno == errno.EPERM
    finally:
        os.close(fd)
        tier.close()
