"""MaxText's flags keep their meaning."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import grain.python as grain
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_managers as ocm
from world import World, same

from emergency_ckpt.config import Config
from emergency_ckpt.core.save.timing import Continuous
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.maxtext import create_checkpoint_manager, from_maxtext, with_data
from emergency_ckpt.orbax import CheckpointManager

PLACES = {"dir": "/persistent/run", "local_dir": "/dev/shm/eckpt"}


def config(**flags: Any) -> Config:
    return from_maxtext(flags, **PLACES).validated()


def test_defaults_are_maxtexts() -> None:
    made = config()
    assert (made.save_every, made.local_save_every) == (10_000, 0)
    assert made.async_save
    assert list(made.save_plans()) == ["persistent"]


def test_periods() -> None:
    made = config(checkpoint_period=200, local_checkpoint_period=5, max_num_checkpoints_to_keep=3)
    plans = made.save_plans()
    assert plans["local"].rules.intervals == (5,)
    assert plans["persistent"].rules.intervals == (200,)
    assert made.keep_last_n == 3


def test_max_num_checkpoints_as_text_keeps_all() -> None:
    assert config(max_num_checkpoints_to_keep="None").keep_last_n is None
    with pytest.raises(ConfigError, match="checkpoint_period"):
        config(checkpoint_period="None")


def test_continuous() -> None:
    made = config(
        enable_continuous_checkpointing=True,
        local_checkpoint_period=5,
        max_num_checkpoints_to_keep=4,
        async_checkpointing=False,
    )
    assert {name: plan.timing for name, plan in made.save_plans().items()} == {
        "local": (Continuous(),),
        "persistent": (Continuous(),),
    }
    assert made.keep_last_n == 4
    assert not made.async_save


def test_continuous_without_local_period_leaves_local_tier_off() -> None:
    assert list(config(enable_continuous_checkpointing=True).save_plans()) == ["persistent"]


def test_nothing_is_saved_when_checkpointing_is_off() -> None:
    made = config(enable_checkpointing=False, enable_continuous_checkpointing=True)
    assert made.save_plans() == {}
    assert not made.heeds_preemption


def test_objects_with_other_settings_and_settings_that_win() -> None:
    flags = SimpleNamespace(checkpoint_period=7, learning_rate=0.1)
    made = from_maxtext(flags, keep_last_n=2, **PLACES).validated()
    assert (made.save_every, made.keep_last_n) == (7, 2)


@pytest.mark.parametrize("is_continuous", [True, False])
def test_preservation_policy_among_the_settings_wins(world: World, is_continuous: bool) -> None:
    policy = ocm.EveryNSteps(2)
    flags = {
        "enable_continuous_checkpointing": is_continuous,
        "checkpoint_period": 1,
        "max_num_checkpoints_to_keep": 1,
    }
    made = from_maxtext(flags, preservation_policy=policy, **PLACES).validated()
    assert (made.preservation_policy, made.keep_last_n) == (policy, None)
    assert from_maxtext(flags, preservation_policy=None, **PLACES).validated().keep_last_n == 1
    with pytest.raises(ConfigError, match="preservation_policy and keep_last_n are both set"):
        from_maxtext(flags, preservation_policy=policy, keep_last_n=3, **PLACES).validated()
    manager = manager_of(world, further={"preservation_policy": policy}, **flags)
    assert manager is not None
    with manager:
        for step in range(4):
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step)))
            manager.save(step, args, force=True)
            manager.wait_until_finished()
        assert manager.all_steps(read=True) == [0, 2, 3]


def test_backup_interval_of_multi_tier_mode_is_that_of_storage(world: World) -> None:
    flags = {"multi_tier_checkpointing_backup_interval_minutes": 30, "checkpoint_period": 7}
    assert config(**flags).save_every == 7, "the flag of the mode decides"
    made = config(enable_multi_tier_checkpointing=True, **flags)
    assert made.save_every == datetime.timedelta(minutes=30)
    manager = manager_of(world, enable_multi_tier_checkpointing=True, **flags)
    assert manager is not None
    with manager:
        for step in range(8):
            manager.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step))))
            manager.wait_until_finished()
        assert manager.all_steps() == []


def test_multi_tier_mode_needs_one_interval() -> None:
    minutes, steps = (f"multi_tier_checkpointing_backup_interval_{u}" for u in ("minutes", "steps"))
    made = config(enable_multi_tier_checkpointing=True, **{minutes: None, steps: 500})
    assert made.save_every == 500
    for flags in ({}, {minutes: None, steps: "None"}, {minutes: 5, steps: 500}):
        with pytest.raises(ConfigError, match="exactly one of"):
            config(enable_multi_tier_checkpointing=True, **flags)


@pytest.mark.parametrize("flag", ["checkpoint_todelete_subdir", "checkpoint_todelete_full_path"])
def test_flag_that_keeps_removed_steps_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is not supported: leave it unset"):
        config(**{flag: ".trash"})
    for unset in ("None", ""):
        assert config(**{flag: unset}).save_every == config().save_every


def test_all_faults_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        config(checkpoint_period=-1, async_checkpointing="yes", local_checkpoint_period=True)
    assert len(caught.value.problems) == 3


def manager_of(
    world: World, further: Mapping[str, Any] | None = None, **flags: Any
) -> CheckpointManager | None:
    flags = {
        "local_checkpoint_directory": str(world.ramdisk),
        "checkpoint_dir": str(world.persistent),
        **flags,
    }
    return create_checkpoint_manager(
        SimpleNamespace(**flags), world.mesh, world.state(0), **(further or {})
    )


def test_manager_of_the_emergency_mode(world: World) -> None:
    manager = manager_of(
        world, local_checkpoint_period=1, checkpoint_period=3, max_num_checkpoints_to_keep=2
    )
    assert manager is not None
    with manager:
        for step in range(11):
            manager.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step))))
            manager.wait_until_finished()
        assert manager.all_steps() == [6, 9, 10]
        assert same(manager.restore(9).state, world.state(9))


def test_manager_saves_continuously(world: World) -> None:
    manager = manager_of(world, enable_continuous_checkpointing=True, async_checkpointing=False)
    assert manager is not None
    with manager:
        step, deadline_s = 0, time.monotonic() + 60
        while not manager.all_steps() and time.monotonic() < deadline_s:
            step += 1
            manager.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step))))
        assert manager.all_steps()


def test_no_manager_when_checkpointing_is_off(world: World) -> None:
    assert manager_of(world, enable_checkpointing=False) is None


def test_manager_needs_both_directories(world: World) -> None:
    with pytest.raises(ConfigError, match="local_checkpoint_directory"):
        manager_of(world, local_checkpoint_directory="")


def loaders(count: int) -> list[Any]:
    """Return MaxText's objects around Grain's iterators, at the beginning."""
    batches = grain.MapDataset.range(100).shuffle(seed=count).to_iter_dataset()
    return [SimpleNamespace(local_iterator=iter(batches)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2], ids=["one iterator", "a list of them"])
def test_data_goes_on_after_the_restored_step(world: World, count: int) -> None:
    def given(loaders: list[Any]) -> Any:
        return loaders if count > 1 else loaders[0]

    data, again = loaders(count), loaders(count)
    for number, loader in enumerate(data, 1):
        for _ in range(number):
            next(loader.local_iterator)
    manager = manager_of(world, local_checkpoint_period=1)
    assert manager is not None
    with manager:
        state = ocp.args.PyTreeSave(world.state(3))
        with_data(manager, given(data)).save(3, args=ocp.args.Composite(state=state), force=True)
    following = [next(loader.local_iterator) for loader in data]
    manager = manager_of(world, local_checkpoint_period=1)
    assert manager is not None
    with manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(world.state(0)))
        restored = with_data(manager, given(again)).restore(3, args=args)
    assert same(restored.state, world.state(3))
    assert [next(loader.local_iterator) for loader in again] == following


@pytest.mark.parametrize(
    "data", [None, SimpleNamespace(), SimpleNamespace(local_iterator=iter([1]))]
)
def test_data_without_a_state_is_left_out(data: Any) -> None:
    manager: Any = object()
    assert with_data(manager, data) is manager
