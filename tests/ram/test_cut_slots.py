"""Files of slots that are cut under a process: it dies of the signal, and says of what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import JOBS

PROGRAM = JOBS / "cut_program.py"
LINE = "emergency_ckpt: SIGBUS in a mapped slot of the ramdisk: its file was made shorter"


@pytest.mark.parametrize("faulthandler", ["no", "before", "after"])
def test_read_of_a_slot_after_a_cut_says_why(ramdisk: Path, faulthandler: str) -> None:
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
