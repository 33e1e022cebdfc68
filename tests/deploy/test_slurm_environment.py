"""What the Slurm template gives its tasks, run by bash beside commands of Slurm that only note it.

``slurm/slurm_jobs.py`` runs the template on a real cluster, where there is one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from places import ROOT

TEMPLATE = ROOT / "deploy" / "slurm" / "train.sbatch"
NODES = ("n0", "n1", "n2", "n3", "n4")
STALE = {
    "MEGASCALE_COORDINATOR_ADDRESS": "gone:8080",
    "MEGASCALE_NUM_SLICES": "4",
    "MEGASCALE_SLICE_ID": "3",
}
COMMANDS = {
    "sinfo": f"printf '%s idle\\n' {' '.join(NODES)}",
    "scontrol": "echo 'JobId=7 JobState=RUNNING Restarts=0 '",
    "srun": """
[[ " $* " == *" task "* ]] || exit 0
env > task_environment
for node in n0 n1 n2 n3; do echo 0 > "$ENDS/$node.0"; done
""",
}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_variables_of_an_earlier_tpu_job_reach_no_task(tmp_path: Path, commands: Path) -> None:
    """A TPU's runtime would wait for the slices of then, before any line of the program."""
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "run7",
        "SLURM_JOB_NODELIST": "n[0-4]",
        "SLURMD_NODENAME": "n0",
    }
    path = f"{commands}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(TEMPLATE)],
        env={**os.environ, **slurm, **STALE, "KEPT_BY_THE_SITE": "yes", "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    given = (tmp_path / "task_environment").read_text()
    assert "KEPT_BY_THE_SITE=yes" in given
    assert "MEGASCALE_" not in given
