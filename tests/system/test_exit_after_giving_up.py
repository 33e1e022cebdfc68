"""After a persistent save was given up, its threads do not hold up the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_gcs import FakeGcs
from places import JOBS

PROGRAM = JOBS / "given_up_program.py"
# The clients would wait for five minutes at least, storage for ten.
WAIT_S = 200.0


TARGETS = (
    "5/state/*d/*",  # TensorStore: the arrays
    "5/state/array_metadatas/*",  # gcsfs, in workers of thread pools
    "5/state/commit_success.txt",
)


def run(target: str, ram: Path) -> subprocess.CompletedProcess[str]:
    with FakeGcs(buckets=["bucket"], process=True) as gcs:
        environ = {**os.environ, **gcs.environment(), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(PROGRAM), target, str(ram)]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False
        )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """All of them at once: most of the time they wait."""
    with ThreadPoolExecutor(len(TARGETS)) as pool:
        rams = [tmp_path_factory.mktemp("ram") for _ in TARGETS]
        return dict(zip(TARGETS, pool.map(run, TARGETS, rams), strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_process_ends_with_its_own_status(
    ended: dict[str, subprocess.CompletedProcess[str]], target: str
) -> None:
    done = ended[target]
    assert done.returncode == 7, done.stderr[-3000:]
    assert "no answer in time" in done.stdout
    assert done.stdout.endswith("stopped\n")
