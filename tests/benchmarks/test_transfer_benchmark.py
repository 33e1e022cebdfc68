"""The benchmark of transfers ends when its reader does, with its peers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import ROOT


@pytest.mark.slow
def test_transfer_benchmark_without_a_reader_ends() -> None:
    command = [sys.executable, "-m", "benchmarks.transfer"]
    command += ["--mib", "4", "--streams", "1,1,1", "--repeat", "1"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
    ) as run:
        assert run.stdout is not None
        run.stdout.close()
        _, errors = run.communicate(timeout=240)
    # The peers hold the pipe of errors open too: all have ended when it is at its end.
    assert run.returncode != 0
    assert b"BrokenPipeError" in errors
