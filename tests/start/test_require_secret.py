"""``require={"secret"}`` through every face: a start without a given secret is refused at once."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from looks import eckpt_here
from world import World

from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.maxtext import from_maxtext
from emergency_ckpt.orbax import checkpoint as plain

REFUSED = "require has 'secret', but neither secret_file nor ECKPT_SECRET gives a secret"
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ECKPT_SECRET", "ECKPT_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


def test_require_secret_of_the_checkpointer_refuses(world: World) -> None:
    with pytest.raises(ConfigError, match=REFUSED):
        world.open_both(require={"secret"})


def test_require_secret_of_the_orbax_face_refuses(world: World) -> None:
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, with_one_slice=True),
        settings={"require": {"secret"}},
    )
    world.ramdisk.mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=REFUSED):
        emergency.CheckpointManager(
            world.ramdisk, world.persistent, MESH, {"w": 1}, options=options
        )


def test_require_secret_of_the_maxtext_face_refuses(world: World) -> None:
    flags = SimpleNamespace(checkpoint_period=7)
    places = {"dir": str(world.persistent), "local_dir": str(world.ramdisk)}
    with pytest.raises(ConfigError, match=REFUSED):
        from_maxtext(flags, require={"secret"}, **places).validated()


def test_require_secret_of_the_plain_face_refuses(world: World) -> None:
    options = plain.CheckpointManagerOptions(
        local_directory=str(world.ramdisk), settings={"require": {"secret"}}
    )
    with (
        pytest.raises(ConfigError, match=REFUSED),
        plain.CheckpointManager(world.persistent, options=options) as manager,
    ):
        manager.save(1, args=plain.args.StandardSave({"w": jax.numpy.ones(2)}))  # pyright: ignore[reportArgumentType]


def test_require_secret_of_the_axlearn_face_refuses(world: World, axlearn_face: Any) -> None:
    config = importlib.import_module("axlearn.common.config")
    policies = importlib.import_module("axlearn.common.checkpointer")
    every_step = config.config_for_function(policies.every_n_steps_policy).set(n=1)
    cfg = axlearn_face.EmergencyCheckpointer.default_config().set(
        name="checkpointer",
        dir=str(world.persistent),
        trainer_dir=str(world.persistent),
        local_dir=str(world.ramdisk),
        save_policy=every_step,
        local_save_policy=every_step,
        replica_axis_index=0,
        require=("secret",),
    )
    with pytest.raises(ConfigError, match=REFUSED):
        cfg.instantiate(parent=None)


def test_serve_without_a_secret_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eckpt_here("serve", "--local-dir", str(tmp_path), "--run-id", "run-a") != 0
    assert "no secret: give --secret-file or set ECKPT_SECRET" in capsys.readouterr().err
