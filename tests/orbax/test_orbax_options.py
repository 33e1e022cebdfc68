"""The manager's names, fields, defaults and arguments are Orbax's, and ours come behind them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import re
from collections.abc import Callable
from typing import Any

import grain.python as grain
import orbax.checkpoint as ocp
import pytest
from faults import storage_fails
from orbax.checkpoint import checkpoint_managers as ocm
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbaxs
from world import World, same

from emergency_ckpt import orbax as ours
from emergency_ckpt.config import Config
from emergency_ckpt.errors import ConfigError, HostStateError, InvalidState
from emergency_ckpt.orbax.options import settings_of, with_further

OPTIONS = [
    "LocalCheckpointOptions",
    "PersistentCheckpointOptions",
    "MultiprocessingOptions",
    "CheckpointManagerOptions",
]


def defaults(kind: Any) -> list[tuple[str, Any]]:
    made = kind()
    fields = [(field.name, getattr(made, field.name)) for field in dataclasses.fields(kind)]
    return [
        (name, defaults(type(value)) if dataclasses.is_dataclass(value) else value)
        for name, value in fields
        if name != "step_name_format"
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_fields_and_defaults(name: str) -> None:
    theirs = getattr(orbaxs, name)
    mine = {f.name: f for f in dataclasses.fields(getattr(ours, name))}
    assert list(mine)[: len(dataclasses.fields(theirs))] == [
        field.name for field in dataclasses.fields(theirs)
    ]
    known = dict(defaults(getattr(ours, name)))
    for field, value in defaults(theirs):
        if field not in ("local", "persistent"):  # options themselves: looked at on their own
            assert known[field] == value, field


@pytest.mark.parametrize(
    "name",
    [name for name in dir(orbaxs.CheckpointManager) if not name.startswith("_")] + ["__init__"],
)
def test_methods_and_their_arguments(name: str) -> None:
    theirs, mine = (getattr(m.CheckpointManager, name) for m in (orbaxs, ours))
    if isinstance(theirs, property):
        assert isinstance(mine, property)
        return
    known = inspect.signature(mine).parameters
    for argument in inspect.signature(theirs).parameters.values():
        assert known[argument.name].kind == argument.kind, argument
        if argument.default is not inspect.Parameter.empty:
            assert known[argument.name].default == argument.default


def test_it_is_a_checkpoint_manager() -> None:
    assert ocp.AbstractCheckpointManager in ours.CheckpointManager.__mro__
    assert not ours.CheckpointManager.__abstractmethods__


@pytest.mark.parametrize("kind", [ours.LocalCheckpointOptions, ours.PersistentCheckpointOptions])
def test_one_rule_for_what_is_kept(kind: Any) -> None:
    with pytest.raises(ValueError, match="max_to_keep"):
        kind(max_to_keep=2, preservation_policy=ocm.LatestN(2))


def test_period_beside_a_policy() -> None:
    with pytest.raises(ValueError, match="keep_period"):
        ours.PersistentCheckpointOptions(keep_period=2, preservation_policy=ocm.LatestN(2))


def made(**options: Any) -> Config:
    settings = settings_of(ours.CheckpointManagerOptions(**options), one_slice=False)
    return Config(dir="/persistent/run", local_dir="/dev/shm/ckpt").set(**settings).validated()


class HiveNames:
    """A format of the kind that is not followed."""

    def build_name(self, step: int) -> str:
        return f"step={step}"


def test_orbaxs_own_options_are_understood() -> None:
    theirs = orbaxs.CheckpointManagerOptions(
        local=orbaxs.LocalCheckpointOptions(save_interval_steps=3, max_to_keep=2),
        async_options=ocp.AsyncOptions(timeout_secs=77),
        multiprocessing_options=orbaxs.MultiprocessingOptions(coordination_timeout_secs=33),
    )
    settings = settings_of(theirs, one_slice=False)  # type: ignore[arg-type]
    assert settings["local_keep_last_n"] == 2
    config = Config().set(**settings)
    assert config.save_timeout_s == 33
    assert config.total_timeout_s == config.storage_wait_timeout_s == 14400
    theirs.async_options = ocp.AsyncOptions(timeout_secs=20_000)
    longer = settings_of(theirs, one_slice=False)  # type: ignore[arg-type]
    assert longer["total_timeout_s"] == 20_000
    theirs.step_name_format = ocp.path.step.standard_name_format(step_prefix="at")
    assert settings_of(theirs, one_slice=False)["orbax"].step_name == "at_0"  # type: ignore[arg-type]
    theirs.step_name_format = HiveNames()
    with pytest.raises(ValueError, match="step_name_format"):
        settings_of(theirs, one_slice=False)  # type: ignore[arg-type]


def _options(**given: Any) -> Any:
    return ours.CheckpointManagerOptions(**given)


@pytest.mark.parametrize(
    ("options", "mesh", "problem"),
    [
        (5, None, "options must be CheckpointManagerOptions, not 5"),
        (_options(local=5), None, "local must be LocalCheckpointOptions, not 5"),
        (_options(persistent={}), None, "persistent must be PersistentCheckpointOptions, not {}"),
        (_options(replica_axis_index="slice"), None, "replica_axis_index must be a whole number"),
        (_options(multiprocessing_options=3), None, "multiprocessing_options must be"),
        (_options(best_fn=3), None, "best_fn must be a function, not 3"),
        (_options(best_mode="best"), None, "best_mode must be 'max' or 'min'"),
        (_options(settings=3), None, "settings must be a mapping, not 3"),
        (_options(step_name_format=3), None, "step_name_format must be"),
        (
            _options(local=ours.LocalCheckpointOptions(max_to_keep="2", should_save_fn=3)),  # type: ignore[arg-type]
            None,
            "local.max_to_keep must be a whole number of at least 0, not '2';"
            " local.should_save_fn must be a function",
        ),
        (None, "mesh", "global_mesh must be a jax.sharding.Mesh, not 'mesh'"),
    ],
)
def test_wrong_kind_of_option_or_mesh_is_a_config_error(
    world: World, options: Any, mesh: Any, problem: str
) -> None:
    world.ramdisk.mkdir()
    with pytest.raises(ConfigError, match=re.escape(problem)):
        ours.CheckpointManager(world.ramdisk, world.persistent, mesh, (), options=options)


@pytest.mark.parametrize("name", ["item_handlers", "handler_registry"])
def test_handlers_of_the_dataset_are_refused(world: World, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported: leave it out"):
        ours.CheckpointManager(world.ramdisk, world.persistent, None, (), **{name: object()})


def test_dataset_needs_no_directory_of_its_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Orbax's manager saves a dataset only where the caller names such a directory."""
    world.ramdisk.mkdir()
    apart, state = world.persistent.with_name("apart"), world.state(0)
    options = ours.CheckpointManagerOptions(
        persistent=ours.PersistentCheckpointOptions(save_interval_steps=1)
    )

    def opened() -> ours.CheckpointManager:
        places = world.ramdisk, world.persistent, world.mesh, state
        return ours.CheckpointManager(
            *places, options=options, persistent_non_replicated_directory=apart
        )

    def items(kind: Any, data: Any) -> Any:
        dataset = getattr(grain, f"PyGrainCheckpoint{kind}")(data)
        arrays = getattr(ocp.args, f"PyTree{kind}")(state)
        return ocp.args.Composite(state=arrays, dataset=dataset)

    batches = grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset()
    data, again = iter(batches), iter(batches)
    next(data)
    with opened() as manager:
        manager.save(0, items("Save", data))
    world.lose_ram()
    world.ramdisk.mkdir()
    with opened() as manager:
        manager.restore(0, items("Restore", again))
    assert next(again) == next(data)
    assert not apart.exists()
    assert f"nothing is written to {apart}" in caplog.text


def test_dataset_of_a_step_of_orbaxs_is_left_to_orbax(world: World) -> None:
    world.ramdisk.mkdir()
    state = {"w": world.state(0)["w"]}
    apart = world.persistent.with_name("apart")

    def opened(module: Any) -> Any:
        persistent = module.PersistentCheckpointOptions(save_interval_steps=1)
        options = module.CheckpointManagerOptions(persistent=persistent)
        ram = world.ramdisk / module.__name__
        ram.mkdir()
        places = ram, world.persistent, world.mesh, state
        return module.CheckpointManager(
            *places, options=options, persistent_non_replicated_directory=apart
        )

    batches = grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset()
    data, again = iter(batches), iter(batches)
    next(data)
    arrays = ocp.args.PyTreeSave(state)
    with contextlib.closing(opened(orbaxs)) as manager:
        dataset = grain.PyGrainCheckpointSave(data)
        manager.save(0, ocp.args.Composite(state=arrays, dataset=dataset))
        manager.wait_until_finished()
    dataset = grain.PyGrainCheckpointRestore(again)
    with opened(ours) as manager:
        with pytest.raises(HostStateError, match="it has tensors only"):
            manager.restore(0, ocp.args.Composite(dataset=dataset))
        assert same(manager.restore(0).state, state)
    with ocp.CheckpointManager(apart) as manager:
        manager.restore(0, args=dataset)
    assert next(again) == next(data)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("last", [float("nan"), float("inf"), -float("inf")])
def test_metric_that_is_no_number_is_of_no_best_step(world: World, mode: Any, last: float) -> None:
    """A negated one, too, of which the step log has null after a restart."""
    world.ramdisk.mkdir()
    options = ours.CheckpointManagerOptions(
        persistent=ours.PersistentCheckpointOptions(save_interval_steps=1),
        best_fn=lambda found: -found["loss"],
        best_mode=mode,
    )
    state = world.state(0)

    def opened() -> ours.CheckpointManager:
        places = world.ramdisk, world.persistent
        return ours.CheckpointManager(*places, world.mesh, state, options=options)

    with opened() as manager:
        for step, loss in enumerate((float("nan"), 1.0, 3.0, last)):
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
            manager.save(step, args=args, metrics={"loss": loss})
            manager.wait_until_finished()
        assert manager.best_step() == {"min": 2, "max": 1}[mode]
    with opened() as manager:
        assert manager.best_step() == {"min": 2, "max": 1}[mode]


def test_callback_is_called_for_each_step_in_storage(world: World) -> None:
    world.ramdisk.mkdir()
    stored: list[int | None] = []
    every, seldom = ({"save_interval_steps": steps} for steps in (1, 2))
    options = ours.CheckpointManagerOptions(
        local=ours.LocalCheckpointOptions(**every),
        persistent=ours.PersistentCheckpointOptions(**seldom),
        async_options=ocp.AsyncOptions(post_finalization_callback=lambda: stored.append(step)),
        settings={"on_event": world.events.append},
    )
    places = world.ramdisk, world.persistent, world.mesh, world.state(0)
    with ours.CheckpointManager(*places, options=options) as manager:
        for step in range(3):
            manager.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step))))
            manager.wait_until_finished()
    assert stored == [0, 2]
    assert len(world.named("persistent.complete")) == 2


def test_metric_of_zero_is_in_the_metadata(world: World) -> None:
    world.ramdisk.mkdir()
    state = world.state(0)
    places = world.ramdisk, world.persistent, world.mesh, state
    with ours.CheckpointManager(*places) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        manager.save(0, args=args, metrics=0.0)
        manager.wait_until_finished()
        assert manager.metrics(0) == 0.0
        assert manager.metadata(0).metrics == 0.0


@pytest.mark.parametrize("step", [0.0, "0", True, -1, [0]])
def test_what_is_no_step_is_refused_by_every_method(world: World, step: Any) -> None:
    world.ramdisk.mkdir()
    state = world.state(0)
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
    places = world.ramdisk, world.persistent, world.mesh, state
    with ours.CheckpointManager(*places) as manager:
        manager.save(0, args=args)
        manager.wait_until_finished()
        calls: list[Callable[[Any], object]] = [
            manager.metadata,
            manager.item_metadata,
            manager.metrics,
            manager.delete,
            manager.restore,
            manager.should_save,
            manager.reached_preemption,
            lambda step: manager.save(step, args=args),
        ]
        for call in calls:
            with pytest.raises(InvalidState, match="not the number of a step"):
                call(step)
        assert manager.all_steps(read=True) == [0]


def test_when_to_save_and_what_to_keep() -> None:
    config = made(
        local=ours.LocalCheckpointOptions(save_interval_steps=3, max_to_keep=2),
        persistent=ours.PersistentCheckpointOptions(max_to_keep=5, keep_period=100),
    )
    plans = config.save_plans()
    assert [plans[t].rules.intervals for t in ("local", "persistent")] == [(3,), (1000,)]
    assert all(plan.rules.initial and plan.on_preemption for plan in plans.values())
    assert config.local_keep_last_n == 2
    assert (config.keep_last_n, config.keep_every_n_steps) == (5, 100)
    assert config.heeds_preemption
    assert config.on_preemption == "ignore"


def test_policy_takes_the_place_of_all_rules() -> None:
    policy = ocm.SpecificStepsPolicy([4])
    config = made(local=ours.LocalCheckpointOptions(save_decision_policy=policy))
    plan = config.save_plans()["local"]
    assert (plan.rules.intervals, plan.rules.initial, plan.on_preemption) == ((), False, False)


def test_no_local_tier() -> None:
    one_slice = settings_of(ours.CheckpointManagerOptions(), one_slice=True)
    read_only = settings_of(
        ours.CheckpointManagerOptions(local=ours.LocalCheckpointOptions(read_only=True)),
        one_slice=False,
    )
    for settings in (one_slice, read_only):
        config = Config(dir="/persistent/run", local_dir="/dev/shm/ckpt").set(**settings)
        assert list(config.validated().save_plans()) == ["persistent"]


def test_ram_keeps_the_newest_steps() -> None:
    assert made(local=ours.LocalCheckpointOptions()).local_keep_last_n == 1
    newest = ours.LocalCheckpointOptions(preservation_policy=ocm.LatestN(3))
    assert made(local=newest).local_keep_last_n == 3


def test_steps_of_ram_beyond_a_lowered_number_are_named(world: World) -> None:
    world.ramdisk.mkdir()
    state = world.state(0)

    def opened(keep: int) -> ours.CheckpointManager:
        local = ours.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=keep)
        options = ours.CheckpointManagerOptions(local=local)
        places = world.ramdisk, world.persistent
        return ours.CheckpointManager(*places, world.mesh, state, options=options)

    def save(manager: ours.CheckpointManager, step: int) -> None:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(step)))
        manager.save(step, args=args)
        manager.wait_until_finished()

    with opened(3) as manager:
        for step in (1, 2, 3):
            save(manager, step)
    with opened(1) as manager:
        assert manager.all_steps() == manager.all_steps(read=True) == [1, 2, 3]
        assert same(manager.restore(2).state, world.state(2))
        save(manager, 3)
        assert manager.all_steps() == manager.all_steps(read=True) == [1, 3]


def test_manager_takes_the_place_of_one_whose_save_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where nobody has asked the former manager for its errors."""
    world.ramdisk.mkdir()
    places = world.ramdisk, world.persistent, world.mesh, world.state(0)
    options = ours.CheckpointManagerOptions()
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(world.state(0)))
    with monkeypatch.context() as failing:
        storage_fails(failing, "finish")
        former = ours.CheckpointManager(*places, options=options)
        assert former.save(0, args=args)
        with ours.CheckpointManager(*places, options=options) as manager:
            failing.undo()
            assert manager.save(1, args=args, force=True)
            manager.wait_until_finished()
            assert manager.all_steps(read=True)[-1] == 1


@pytest.mark.parametrize("policy", [ocm.LatestN(None), ocm.EveryNSteps(5), ocm.CustomSteps([1])])
def test_policy_of_ram_that_keeps_other_steps_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="RAM keeps the newest steps; set max_to_keep"):
        made(local=ours.LocalCheckpointOptions(preservation_policy=policy))


def test_interval_among_further_settings_beats_the_options() -> None:
    usual = settings_of(ours.CheckpointManagerOptions(), one_slice=False)
    places = {"dir": "/persistent/run", "local_dir": "/dev/shm/ckpt"}

    def config(**further: Any) -> Config:
        return Config(**places).set(**with_further(usual, further)).validated()

    without = config().save_plans()
    for further in ({"save_every": datetime.timedelta(minutes=10)}, {"save_every": 7}):
        plans = config(**further).save_plans()
        alone = Config(**places, **further).save_plans()
        assert plans["persistent"] == alone["persistent"] != without["persistent"]
        assert plans["local"] == without["local"]
        assert config(**further).heeds_preemption
    plans = config(local_save_every=datetime.timedelta(seconds=5)).save_plans()
    assert plans["persistent"] == without["persistent"]
    assert plans["local"] != without["local"]


@pytest.mark.parametrize("further", [{"keep_last_n": 2}, {"preservation_policy": ocm.LatestN(2)}])
@pytest.mark.parametrize("given", [{"max_to_keep": 5}, {"preservation_policy": ocm.LatestN(5)}])
def test_further_setting_of_what_is_kept_beats_the_options(given: Any, further: Any) -> None:
    persistent = ours.PersistentCheckpointOptions(**given)
    usual = settings_of(ours.CheckpointManagerOptions(persistent=persistent), one_slice=False)
    config = Config(dir="/persistent/run", local_dir="/dev/shm/ckpt")
    config.set(**with_further(usual, further)).validated()
    kept = {"keep_last_n": config.keep_last_n, "preservation_policy": config.preservation_policy}
    assert {name: value for name, value in kept.items() if value is not None} == further


def test_policy_among_further_settings_decides_on_preemptions() -> None:
    further = {"save_every": [ocm.FixedIntervalPolicy(3), 7]}
    assert with_further({}, further) == further
