"""The library without extras and tools: it trains, saves, loses its RAM and restores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import emergency_ckpt

_PROGRAM = """
import sys
from pathlib import Path

# An editable installation finds the checkout, whatever the path says.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import emergency_ckpt

assert Path(emergency_ckpt.__file__).is_relative_to(sys.argv[1]), emergency_ckpt.__file__
import jax
import jax.numpy as jnp

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import ConfigError

config = EmergencyCheckpointer.default_config().set(
    dir=sys.argv[2] + "/stored", local_dir=sys.argv[2] + "/ram", local_save_every=1, save_every=2
)
for life, last in enumerate((4, 6)):
    with config.instantiate() as ckpt:
        step, state = ckpt.restore(state={"w": jnp.zeros(4)})
        for step in range((step or 0) + 1, last + 1):
            state = {"w": state["w"] + step}
            ckpt.save(step=step, state=state)
        ckpt.wait_until_finished()
    print(life, step, float(state["w"][0]))
try:
    config.set(on_event="hang(600)").instantiate()
except ConfigError as error:
    print(error)
"""


def test_library_without_extras_trains_and_restores(ramdisk: Path) -> None:
    package = Path(emergency_ckpt.__file__).parent
    copy = ramdisk / "without" / "emergency_ckpt"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("extras", "tools", "__pycache__"))
    native = sys.modules["emergency_ckpt._native"].__file__
    assert native is not None
    shutil.copy(native, copy)
    env = {**os.environ, "PYTHONPATH": str(copy.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _PROGRAM, str(copy.parent), str(ramdisk)]
    done = subprocess.run(
        command, env=env, cwd=ramdisk, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, error = done.stdout.splitlines()
    assert first == "0 4 10.0"
    assert second == "1 6 21.0"
    assert "on_event: there is no extra 'hang'" in error
