"""Each small benchmark that has no test of its own runs to its end, with little to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PROGRAMS = {
    "bucket_save": "--mib 4 --rounds 1 --least 0.001",
    "disk_save": "--mib 4 --leaves 2 --rounds 1 --storage {}",
    "many_leaves": "--leaves 20 --rounds 1",
    "many_steps": "--steps 5 --saves 1",
    "storage_reads": "--mib 4 --leaves 2 --rounds 1 --storage {}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_small_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            f"benchmarks.micro.{name}",
            *PROGRAMS[name].format(tmp_path).split(),
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
