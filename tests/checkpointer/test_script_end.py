"""The end of a program that does not call ``stop``: what it saved last is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from orbax.checkpoint import CheckpointManager

PROGRAM = """
import sys
import jax, numpy as np
from emergency_ckpt import EmergencyCheckpointer

config = EmergencyCheckpointer.default_config().set(dir=sys.argv[1], local_dir=sys.argv[2])
ckpt = config.instantiate()
state = {f"leaf_{i}": jax.numpy.full((256, 1024), i, "float32") for i in range(32)}
for step in (1, 2):
    ckpt.save(step=step, state=state, force=True)
ENDING
"""


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise ValueError('of the program')"])
def test_program_without_stop_keeps_its_last_save(
    tmp_path: Path, ramdisk: Path, ending: str
) -> None:
    program, directory = tmp_path / "program.py", tmp_path / "dir"
    program.write_text(PROGRAM.replace("ENDING", ending))
    done = subprocess.run(
        [sys.executable, str(program), str(directory), str(ramdisk)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == {"p": 0, "s": 3, "r": 1}[ending[0]], done.stderr
    assert "cannot schedule new futures" not in done.stderr
    with CheckpointManager(directory) as manager:
        assert manager.latest_step() == 2
