"""What a restart need not wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer

local_dir, storage = sys.argv[1:]
config = EmergencyCheckpointer.default_config().set(
    dir=storage, local_dir=local_dir, local_save_every_n_steps=1, save_every_n_steps=10,
    host_state_buddies=0,
)
with config.instantiate() as ckpt:
    step, state = ckpt.restore(state={"w": jnp.zeros(8)})
    if step is None:
        ckpt.save(step=1, state={"w": jnp.ones(8)})
        ckpt.wait_until_finished()
    print(step, float(state["w"].sum()), "orbax.checkpoint" in sys.modules)
"""


def test_checkpointer_restart_from_ram_imports_no_orbax(ramdisk: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(ramdisk), str(tmp_path)]
    shown = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2)]
    assert [each.stdout.strip() for each in shown] == ["None 0.0 False", "1 8.0 False"]
