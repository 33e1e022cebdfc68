"""A training loop that ends by an exception while storage hangs: told at once, and over soon."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from programs import ended, started
from world import World, save_all

from emergency_ckpt.cluster import LeftProcesses

PROGRAM = """
import sys, threading
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config import Config
from emergency_ckpt.storage import PersistentTier
root, limit_s = sys.argv[1], float(sys.argv[2])
hanging = threading.Event()
def hang(*_, **__):
    hanging.set()
    threading.Event().wait()
PersistentTier.write_tensors = hang
Config.exit_timeout_s = limit_s
with EmergencyCheckpointer(
    run_id="run", dir=root + "/storage", local_dir=root + "/ram", local_save_every=0, save_every=1,
) as checkpointer:
    checkpointer.save(step=1, state={"w": jnp.zeros(4)})
    assert hanging.wait(60)
    raise KeyError("a bug")
"""


STRANGE_NAME = """
import os, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from emergency_ckpt import EmergencyCheckpointer
def opened():
    return EmergencyCheckpointer(
        run_id="run", local_dir=sys.argv[1] + "/ram", local_save_every=1, save_every=0
    )
name = os.fsdecode(b"caf\\xe9.tfrecord")  # what os.listdir returns of such a file
try:
    with opened() as checkpointer:
        checkpointer.save(step=1, state={"w": jnp.zeros(4)})
        checkpointer.wait_until_finished()
        raise ValueError(f"bad record in {name}")
except ValueError as error:
    print("raised", ascii(str(error)))
with opened() as checkpointer:  # whose ramdisk the first one no longer has
    print("restored", checkpointer.restore(state={"w": jnp.ones(4)})[0])
"""


ENV = {"ECKPT_SECRET": "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"}


def test_exception_while_storage_hangs_ends_the_program(tmp_path: Path) -> None:
    done = ended("-c", PROGRAM, tmp_path, 0.2, env=ENV, timeout_s=100)
    log = done.stderr
    assert done.returncode == 1, log
    assert "training ended by KeyError: 'a bug'" in log
    assert "saves in progress are cancelled" in log
    assert log.rstrip().endswith("KeyError: 'a bug'"), "the error of training is what is raised"


def test_exception_with_a_name_that_is_no_unicode_releases_all(tmp_path: Path) -> None:
    done = ended("-c", STRANGE_NAME, tmp_path, env=ENV, timeout_s=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "raised 'bad record in caf\\udce9.tfrecord'",
        "restored 1",
    ]


def test_end_that_cannot_be_told_releases_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("scripted")

    def train() -> None:
        with world.open_both() as checkpointer:
            save_all(checkpointer, world, 1)
            raise KeyError("a bug")

    monkeypatch.setattr(LeftProcesses, "leave", fail)
    with pytest.raises(RuntimeError, match="scripted"):
        train()
    monkeypatch.undo()
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0))[0] == 1


def test_second_signal_ends_a_program_that_waits(tmp_path: Path) -> None:
    words = ("-c", PROGRAM, tmp_path, 10_000.0)
    with started(*words, env=ENV, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            # Each is sent when the program has said that it is ready for it.
            if "saves in progress have" in line:
                process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == -signal.SIGTERM
