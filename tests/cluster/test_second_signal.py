"""Signals to a process that is about to end: the first is answered, the second ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import io, os, signal, sys
from absl import logging
from emergency_ckpt.cluster.preemption import second_signal_ends

class Interrupted(io.FileIO):
    signals = 1
    def write(self, data):
        if self.signals:
            self.signals -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)

raw = io.BufferedWriter(Interrupted(2, "wb", closefd=False))
sys.stderr = io.TextIOWrapper(raw, line_buffering=True)
with second_signal_ends():
    logging.error("a line that the signal interrupts")
"""


def test_first_signal_during_a_log_line_is_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a second signal ends the process" in done.stderr
    assert "a line that the signal interrupts" in done.stderr
    assert "Traceback" not in done.stderr


WAITING = """
import os, signal, time
from emergency_ckpt.cluster.preemption import second_signal_ends

with second_signal_ends():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""


def test_second_signal_ends_a_wait_without_handlers() -> None:
    """The second signal is not Python's to handle."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "a second signal ends the process" in done.stderr
