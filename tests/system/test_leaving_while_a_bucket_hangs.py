"""A training loop that ends by an exception while a bucket answers no write of TensorStore's.

Storage hangs inside the clients, in a real process, for longer than the test may take: what ends
is not waiting for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from places import JOBS

PROGRAM = JOBS / "hanging_bucket_program.py"
SHORT_S = 0.2
NEVER_S = 10_000.0
TARGETS = (
    "5/state/*d/*",  # TensorStore: the arrays
    "5/state/array_metadatas/*",  # gcsfs, in workers of thread pools
    "5/state/commit_success.txt",
)


@contextmanager
def started(target: str, ram: Path, exit_timeout_s: float) -> Generator[subprocess.Popen[str]]:
    """The program, its log in a pipe; over, one way or another, before the server is."""
    command = [sys.executable, str(PROGRAM), target, str(ram), str(exit_timeout_s)]
    with FakeGcs(buckets=["bucket"], process=True) as gcs:
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.mark.parametrize("target", TARGETS)
def test_exception_while_a_bucket_hangs_ends_the_program(tmp_path: Path, target: str) -> None:
    with started(target, tmp_path / "ram", SHORT_S) as process:
        # Far less than the server's silence, far more than exit_timeout_s.
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1, log
    said, given_up = "training ended by KeyError: 'a bug'", "saves in progress are cancelled"
    assert 0 <= log.find(said) < log.find(given_up), log
    assert log.rstrip().endswith("KeyError: 'a bug'"), "the error of training is what is raised"


def test_second_signal_while_a_bucket_hangs_ends_the_program(tmp_path: Path) -> None:
    with started(TARGETS[0], tmp_path / "ram", NEVER_S) as process:
        assert process.stderr is not None
        signals = 0
        for line in process.stderr:
            # Each is sent when the program has said that it is ready for it.
            if "saves in progress have" in line:
                process.send_signal(signal.SIGTERM)
                signals += 1
        process.wait(60)
    assert (signals, process.returncode) == (2, -signal.SIGTERM)
