"""The end of a program that does not call ``stop``: what it saved last is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from orbax.checkpoint import CheckpointManager
from programs import ended

pytestmark = pytest.mark.skipif(
    (3, 12) <= sys.version_info[:3] < (3, 12, 3), reason="this Python starts no thread at the end"
)

OPEN = """
import sys
import jax, numpy as np
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config import OrbaxFace

config = EmergencyCheckpointer.default_config().set(
    dir=sys.argv[1],
    local_dir=sys.argv[2],
)
config.orbax = OrbaxFace(waits_for_storage=True)  # a slow disk must not cost a save
ckpt = config.instantiate()
"""
SAVE = """
state = {f"leaf_{i}": jax.numpy.full((256, 1024), i, "float32") for i in range(32)}
for step in (1, 2):
    ckpt.save(step=step, state=state, force=True)
"""
IN_A_THREAD = """
import sys, threading, time
import jax
from emergency_ckpt import EmergencyCheckpointer

def train():
    config = EmergencyCheckpointer.default_config().set(dir=sys.argv[1], local_dir=sys.argv[2])
    ckpt = config.instantiate()
    started.set()
    for step in (1, 2, 3):
        time.sleep(0.5)  # the main thread has ended
        ckpt.save(step=step, state={"w": jax.numpy.full(64, step, "float32")}, force=True)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
    print("trained", flush=True)

started = threading.Event()
threading.Thread(target=train).start()
started.wait()
"""
STOPS_IN_A_THREAD = """
import sys, threading, time
import jax, numpy as np
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.storage import PersistentTier

finish = PersistentTier.finish

def slowly(*args, **kwargs):
    time.sleep(2)  # the main thread has ended
    return finish(*args, **kwargs)

PersistentTier.finish = slowly

def train():
    config = EmergencyCheckpointer.default_config().set(dir=sys.argv[1], local_dir=sys.argv[2])
    with config.instantiate() as ckpt:
        state = {f"leaf_{i}": jax.numpy.full((256, 1024), i, "float32") for i in range(8)}
        ckpt.save(step=1, state=state, force=True)
        trained.set()
    print("stopped", flush=True)

trained = threading.Event()
threading.Thread(target=train).start()
trained.wait()
"""
LOOK = "print('newest', ckpt.latest_step())"


def run_program(
    tmp_path: Path, text: str, directory: str, ramdisk: Path
) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    return ended(program, directory, ramdisk, timeout_s=240)


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise ValueError('of the program')"])
def test_program_without_stop_keeps_its_last_save(
    tmp_path: Path, ramdisk: Path, ending: str
) -> None:
    directory = tmp_path / "dir"
    done = run_program(tmp_path, OPEN + SAVE + ending, str(directory), ramdisk)
    assert done.returncode == {"p": 0, "s": 3, "r": 1}[ending[0]], done.stderr
    assert "cannot schedule new futures" not in done.stderr
    with CheckpointManager(directory) as manager:
        assert manager.latest_step() == 2, done.stderr


def test_program_that_trains_in_a_thread_goes_on(tmp_path: Path, ramdisk: Path) -> None:
    """Its main thread ends first, and the program with the thread that trains."""
    directory = tmp_path / "dir"
    done = run_program(tmp_path, IN_A_THREAD, str(directory), ramdisk)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    with CheckpointManager(directory) as manager:
        assert manager.latest_step() == 3


def test_program_waits_for_a_thread_that_stops_its_checkpointer(
    tmp_path: Path, ramdisk: Path
) -> None:
    """The main thread ends while that thread is inside ``stop``."""
    directory = tmp_path / "dir"
    done = run_program(tmp_path, STOPS_IN_A_THREAD, str(directory), ramdisk)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
    with CheckpointManager(directory) as manager:
        assert manager.latest_step() == 1, done.stderr


@pytest.mark.usefixtures("gcs")
def test_program_without_stop_keeps_its_last_save_in_a_bucket(
    tmp_path: Path, ramdisk: Path
) -> None:
    """Its clients work in pools and loops of their own."""
    done = run_program(tmp_path, OPEN + SAVE, "gs://bucket/run", ramdisk)
    assert done.returncode == 0, done.stderr
    assert "cannot schedule new futures" not in done.stderr
    found = run_program(tmp_path, OPEN + LOOK, "gs://bucket/run", ramdisk / "other")
    assert "newest 2" in found.stdout, found.stderr
