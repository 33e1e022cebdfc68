"""Settings that are probably a mistake: said, or refused, before training begins."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from world import World, logged, save_all

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config import Config
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.start import LAUNCHED_COUNT, config_warnings


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("slice", "fsdp"))


def config(**settings: Any) -> Config:
    defaults: dict[str, Any] = {"local_dir": "/dev/shm/x", "run_id": "r", "mesh": mesh_of(2, 4)}
    return Config().set(**{**defaults, **settings}).validated()


@pytest.fixture
def with_threads_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 12, 3, "final", 0))


@pytest.mark.parametrize(("patch", "count"), [(0, 1), (2, 1), (3, 0)])
def test_python_that_ends_without_threads_is_said(
    monkeypatch: pytest.MonkeyPatch, patch: int, count: int
) -> None:
    monkeypatch.setattr("sys.version_info", (3, 12, patch, "final", 0))
    assert sum("`stop`" in text for text in config_warnings(config())) == count


@pytest.mark.usefixtures("with_threads_at_the_end")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"local_save_every": 0}, "neither tier saves"),
        ({"mesh": None}, ""),
    ],
)
def test_config_warnings_doubtful_setting_is_named(settings: dict[str, Any], said: str) -> None:
    warnings = config_warnings(config(**settings))
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)


def test_checkpointer_says_warnings_at_start(world: World) -> None:
    with logged() as lines, world.open(local_save_every=0):
        pass
    assert [line for line in lines if "neither tier saves" in line]
    assert [e.point for e in world.events if e.name == "warning"] == ["warning.setting"]


@pytest.mark.parametrize(
    ("directory", "local_dir", "problem"),
    [
        ("/dev/shm/run/stored", "/dev/shm/run", "would be lost with RAM"),
        ("/dev/shm/run", "/dev/shm/run/", "would be lost with RAM"),
        ("/data/run", "/data/run/../run/ram", "lies inside dir"),
    ],
)
def test_config_tiers_inside_each_other_are_refused(
    directory: str, local_dir: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Config(dir=directory, local_dir=local_dir).validated()
    Config(dir="/data/run", local_dir="/data/run2").validated()


def test_config_misspelt_attribute_names_the_nearest() -> None:
    settings = EmergencyCheckpointer.default_config()
    with pytest.raises(ConfigError, match="did you mean 'save_every'"):
        settings.save_evry = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="did you mean 'save_every'"):
        settings.set(save_evry=3)
    settings.save_every = 3
    assert settings.save_every == 3


def test_checkpointer_in_a_job_not_joined_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED_COUNT, "4")
    with pytest.raises(ConfigError, match=r"started 4 processes .* is 1: call jax\.distributed"):
        world.open()
    monkeypatch.setenv(LAUNCHED_COUNT, "1")
    world.open().stop()


@pytest.mark.parametrize("stores", [True, False])
def test_job_of_one_process_is_told_once_of_its_one_copy(world: World, stores: bool) -> None:
    with logged() as lines, world.open_both() if stores else world.open() as checkpointer:
        checkpointer.restore(state=world.state(0))
        save_all(checkpointer, world, 1, 2)
        checkpointer.restore(state=world.state(0))
        save_all(checkpointer, world, 3)
    (said,) = [line for line in lines if "one copy in RAM" in line]
    other = "this checkpointer has no other, since dir is not set"
    back = f"the newest step in {world.persistent}" if stores else other
    assert "The loss of the host costs every step in RAM" in said
    assert said.endswith(back)
    (event,) = world.named("warning", cause="single_copy")
    assert event.fields["single_bytes"] == event.fields["state_bytes"]


def test_job_of_one_process_without_ram_tier_is_told_nothing(world: World) -> None:
    with world.open_both(local_save_every=0) as checkpointer:
        save_all(checkpointer, world, 2)
    assert not world.named("warning", cause="single_copy")
