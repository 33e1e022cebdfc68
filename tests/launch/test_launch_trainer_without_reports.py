"""``eckpt launch`` of a trainer that calls its checkpointer, and reports nothing by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.faults.__main__ import main as with_faults

TRAINER = """
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

env = JobEnvironment.from_environ()
initialize_job(env)
settings = {"local_dir": str(env.local_dir), "local_save_every": 4, "run_id": "run"}
with EmergencyCheckpointer(**settings) as ckpt:
    step, state = ckpt.restore(state={"w": jnp.zeros(4)})
    for step in range((step or 0) + 1, 13):
        ckpt.save(step=step, state=state)
        ckpt.wait_until_finished()
"""


@pytest.mark.process  # by the name of a command
def test_fault_at_a_step_fires_once_the_loop_has_passed_it(
    ram: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER)
    words = ["--slices=1", "--hosts-per-slice=1", "--timeout-s=200", "--quiet"]
    words += [f"--local-root={ram / 'root'}", f"--log-dir={tmp_path / 'logs'}"]
    words += ["--fault", "step=6 kill=process:0 exact", "--", sys.executable, str(program)]
    code = with_faults(words)
    lines = capfd.readouterr().err
    assert code == 0, lines
    assert "fault.fired restart_count=0 fault=step=6 kill=process:0 exact step=6" in lines
    assert "life.ended restart_count=0 ending=died step=6" in lines
