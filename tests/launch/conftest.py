"""Real jobs of tiny Python programs, without JAX."""

from __future__ import annotations

import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import JobSpec, MakeSpec

# Every program starts with this: one integer step, kept in the host's RAM.
PRELUDE = """
import os, signal, subprocess, sys, time
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.extras.progress import report_step

env = JobEnvironment.from_environ()
saved = env.local_dir / "saved"
start = int(saved.read_text()) if saved.exists() else 0
print(f"life {env.restart_count} process {env.process_index} on {env.local_dir.name} from {start}")

def train(last, seconds=0.01):
    for step in range(start, last + 1):
        saved.with_suffix(".tmp").write_text(str(step))
        os.replace(saved.with_suffix(".tmp"), saved)
        report_step(step)
        time.sleep(seconds)
"""


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory on tmpfs, removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def make_spec(ram: Path, tmp_path: Path) -> MakeSpec:
    """Makes a job whose processes run ``PRELUDE`` and the given lines."""

    def make(
        program: str, *, slices: int = 2, hosts_per_slice: int = 1, **fields: object
    ) -> JobSpec:
        script = tmp_path / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(program))
        values: dict[str, object] = {"grace_s": 0.3, "env": {"PYTHONPATH": ":".join(sys.path)}}
        return JobSpec(
            command=(sys.executable, str(script)),
            slices=slices,
            hosts_per_slice=hosts_per_slice,
            devices_per_host=1,
            local_root=ram / "root",
            log_dir=tmp_path / "logs",
            **{**values, **fields},  # type: ignore[arg-type]
        )

    return make
