"""A training loop that ends while a bucket answers no write, by an exception or a return.

Storage hangs inside the clients, in a real process, for longer than the test may take: what ends
is not waiting for it.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from places import JOBS
from programs import Program, started

PROGRAM = JOBS / "hanging_bucket_program.py"
READING_PROGRAM = JOBS / "hanging_read_program.py"
SHORT_S = 0.2
NEVER_S = 10_000.0
DEFAULT_S = 30.0
# The clients would wait for five minutes at least, storage for ten.
WAIT_S = 200.0
TARGETS = (
    "5/state/*d/*",  # TensorStore: the arrays
    "5/state/array_metadatas/*",  # gcsfs, in workers of thread pools
    "5/state/commit_success.txt",
)


@contextmanager
def hanging(end: str, target: str, ram: Path, exit_timeout_s: float) -> Iterator[Program]:
    """The program, what it says in pipes; over, one way or another, before the server is."""
    words = (PROGRAM, end, target, ram, exit_timeout_s)
    with (
        FakeGcs(buckets=["bucket"]) as gcs,
        started(*words, env=gcs.environment(), stderr=subprocess.PIPE) as process,
    ):
        yield process


@pytest.mark.parametrize("target", TARGETS)
def test_exception_while_a_bucket_hangs_ends_the_program(tmp_path: Path, target: str) -> None:
    with hanging("raise", target, tmp_path / "ram", SHORT_S) as process:
        # Far less than the server's silence, far more than exit_timeout_s.
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1, log
    said, given_up = "training ended by KeyError: 'a bug'", "saves in progress are cancelled"
    assert 0 <= log.find(said) < log.find(given_up), log
    assert log.rstrip().endswith("KeyError: 'a bug'"), "the error of training is what is raised"


@pytest.mark.parametrize("name", ["_sharding", "_CHECKPOINT_METADATA"])
def test_restore_while_a_bucket_hangs_ends_the_program(tmp_path: Path, name: str) -> None:
    """Orbax reads the first in a worker of a thread pool, which the interpreter joins at exit."""
    words = (READING_PROGRAM, tmp_path / "ram", f"*{name}*")
    with (
        FakeGcs(buckets=["bucket"]) as gcs,
        started(*words, env=gcs.environment(), stderr=subprocess.PIPE) as process,
    ):
        said, log = process.communicate(timeout=120)
    assert process.returncode == 7, log[-3000:]
    assert "no answer in time" in said


def test_second_signal_while_a_bucket_hangs_ends_the_program(tmp_path: Path) -> None:
    with hanging("raise", TARGETS[0], tmp_path / "ram", NEVER_S) as process:
        assert process.stderr is not None
        signals = 0
        for line in process.stderr:
            # Each is sent when the program has said that it is ready for it.
            if "saves in progress have" in line:
                process.send_signal(signal.SIGTERM)
                signals += 1
        process.wait(60)
    assert (signals, process.returncode) == (2, -signal.SIGTERM)


def ended(target: str, ram: Path) -> tuple[int, str, str]:
    with hanging("return", target, ram, DEFAULT_S) as process:
        said, log = process.communicate(timeout=WAIT_S)
    return process.returncode, said, log


def test_return_after_saves_were_given_up_has_its_own_status(tmp_path: Path) -> None:
    """All targets at once, since most of the time they wait: no thread holds up the end."""
    rams = [tmp_path / str(number) for number in range(len(TARGETS))]
    with ThreadPoolExecutor(len(TARGETS)) as pool:
        for status, said, log in pool.map(ended, TARGETS, rams):
            assert status == 7, log[-3000:]
            assert "no answer in time" in said
            assert said.endswith("stopped\n")
