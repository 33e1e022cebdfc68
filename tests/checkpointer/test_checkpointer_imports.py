"""What a restart need not wait for, and the first save to storage neither."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from programs import printed

import emergency_ckpt
from emergency_ckpt import _native as emergency_ckpt_native

PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer

local_dir, storage = sys.argv[1:]
config = EmergencyCheckpointer.default_config().set(
    dir=storage, local_dir=local_dir, local_save_every=1, save_every=10
)
with config.instantiate() as ckpt:
    step, state = ckpt.restore(state={"w": jnp.zeros(8)})
    print(step, float(state["w"].sum()), "orbax.checkpoint" in sys.modules)
    if step is None:
        ckpt.save(step=1, state={"w": jnp.ones(8)})
        ckpt.wait_until_finished()
"""
PREPARED = """
    import time
    end_s = time.monotonic() + 60
    while "emergency_ckpt.storage.step_writer" not in sys.modules and time.monotonic() < end_s:
        time.sleep(0.05)
    print("emergency_ckpt.storage.step_writer" in sys.modules, ckpt.all_steps())
"""


def test_checkpointer_restart_from_ram_imports_no_orbax(ramdisk: Path, tmp_path: Path) -> None:
    shown = [printed("-c", PROGRAM, ramdisk, tmp_path) for _ in range(2)]
    assert [each.strip() for each in shown] == ["None 0.0 False", "1 8.0 False"]


def test_first_save_to_storage_finds_its_code_loaded(ramdisk: Path, tmp_path: Path) -> None:
    told = printed("-c", PROGRAM + PREPARED, ramdisk, tmp_path)
    assert told.splitlines() == ["None 0.0 False", "True [1]"]


STORAGE_ALONE = """
import sys, threading
from importlib.machinery import PathFinder
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from emergency_ckpt import EmergencyCheckpointer

WRITER = "emergency_ckpt.storage.step_writer"
loaded, loaders = threading.Event(), []

class Noted(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == WRITER:
            loaders.append(threading.current_thread())
            loaded.set()
        return None

sys.meta_path.insert(0, Noted)
with EmergencyCheckpointer(dir=sys.argv[1], local_save_every=0, save_every=10) as ckpt:
    state = {"w": jnp.zeros(8)}
    if sys.argv[2] == "restores":
        ckpt.restore(state=state)
    print(WRITER in sys.modules, len(loaders))
    print(ckpt.save(step=1, state=state), loaded.wait(20))
    print([thread is threading.main_thread() for thread in loaders], ckpt.all_steps())
"""


@pytest.mark.parametrize("way", ["restores", "begins"])
def test_code_that_writes_storage_is_loaded_after_the_first_step(tmp_path: Path, way: str) -> None:
    """A job without saves to RAM: in the background, well before its first save."""
    told = printed("-c", STORAGE_ALONE, tmp_path, way)
    assert told.splitlines() == ["False 0", "False True", "[False] []"]


def test_library_saves_and_restores_without_the_tools(ramdisk: Path, tmp_path: Path) -> None:
    """A finder that comes first leads to a copy of the package, from which ``tools`` is deleted."""
    copy = tmp_path / "emergency_ckpt"
    shutil.copytree(Path(emergency_ckpt.__file__).parent, copy)
    shutil.rmtree(copy / "tools")
    native = Path(str(emergency_ckpt_native.__file__))
    if not (copy / native.name).exists():
        shutil.copy(native, copy)
    first = (
        "import importlib.machinery, sys\nsys.meta_path.insert(0, importlib.machinery.PathFinder)\n"
    )
    program = first + PROGRAM + "print(sys.modules['emergency_ckpt'].__file__)\n"
    command = ["-P", "-c", program, ramdisk, tmp_path / "storage"]
    for expected in ("None 0.0 False", "1 8.0 False"):
        told = printed(*command, env={"PYTHONPATH": str(tmp_path)})
        assert told.splitlines() == [expected, str(copy / "__init__.py")]
