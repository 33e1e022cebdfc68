"""The Slurm template: its tasks and its end, run by bash beside commands that stand for Slurm's.

``slurm/slurm_jobs.py`` runs the template on a real cluster, where there is one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

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


# A guard runs until its allocation ends. An admin drains the spare once the job runs.
DEATHS_BESIDE_A_SPARE = {
    **COMMANDS,
    "sinfo": "echo n0 idle; [[ -e drained ]] && echo n1 drain || echo n1 idle",
    "srun": """
[[ " $* " == *" task "* ]] || exec sleep 1000
touch drained
echo 1 > "$ENDS/n0.0"
exit 1
""",
    "eckpt": 'echo "$1" >> eckpt_commands',
}


def run_template(
    tmp_path: Path, commands: Mapping[str, str], *, nodes: int = 4, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the template in ``tmp_path`` with these commands; end what it left running."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = tmp_path / "train.sbatch"
    text = TEMPLATE.read_text().replace("\nnodes=4 ", f"\nnodes={nodes} ")
    script.write_text(text.replace("local_dir=/dev/shm/eckpt", f"local_dir={tmp_path}/ram"))
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "run7",
        "SLURM_JOB_NODELIST": "n[0-4]",
        "SLURMD_NODENAME": "n0",
    }
    path = f"{folder}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, **slurm, **variables, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(job.args, job.returncode, said)


def test_variables_of_an_earlier_tpu_job_reach_no_task(tmp_path: Path) -> None:
    """A TPU's runtime would wait for the slices of then, before any line of the program."""
    done = run_template(tmp_path, COMMANDS, **STALE, KEPT_BY_THE_SITE="yes")
    assert done.returncode == 0, done.stdout
    given = (tmp_path / "task_environment").read_text()
    assert "KEPT_BY_THE_SITE=yes" in given
    assert "MEGASCALE_" not in given


def test_job_that_is_given_up_waits_for_no_guard(tmp_path: Path) -> None:
    """One node of the two is drained, so the drain finds no other node whose RAM it could ask."""
    done = run_template(tmp_path, DEATHS_BESIDE_A_SPARE, nodes=1)
    assert "given up because 3 lives" in done.stdout
    assert (tmp_path / "eckpt_commands").read_text() == "drain\n"
    assert done.returncode == 1
