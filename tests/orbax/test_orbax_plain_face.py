"""``emergency_ckpt.orbax.checkpoint``: the loop of plain Orbax, its names and its arguments."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grain.python as grain
import jax
import numpy as np
import orbax.checkpoint as plain
import pytest
from drains import Drains
from jax.experimental.layout import Format, Layout
from state_samples import assert_same
from world import World, same

import emergency_ckpt.orbax.checkpoint as ocp
from emergency_ckpt import orbax as emergency
from emergency_ckpt.config import run_id_of


@pytest.fixture(autouse=True)
def ramdisk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the RAM tier is when the loop says nothing of it."""
    monkeypatch.setenv("ECKPT_LOCAL_DIR", str(world.ramdisk))


def manager_of(world: World, *given: Any, **more: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(world.persistent, *given, **more)


def test_every_other_name_is_orbaxs_own() -> None:
    ours = {"CheckpointManager", "CheckpointManagerOptions"}
    names = {name for name in dir(plain) if not name.startswith("_")} - ours
    assert names >= {"args", "PyTreeCheckpointer", "utils", "AsyncOptions"}
    assert [name for name in names if getattr(ocp, name) is not getattr(plain, name)] == []
    with pytest.raises(AttributeError):
        ocp.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [name for name in dir(plain.CheckpointManager) if not name.startswith("_")] + ["__init__"],
)
def test_plain_manager_has_orbaxs_methods_and_arguments(name: str) -> None:
    theirs, mine = (getattr(m.CheckpointManager, name) for m in (plain, ocp))
    if isinstance(theirs, property):
        assert isinstance(mine, property)
        return
    known = inspect.signature(mine).parameters
    wanted = inspect.signature(theirs).parameters
    assert list(known)[: len(wanted)] == list(wanted)


def test_manager_is_none_of_the_emergency_ones(world: World) -> None:
    """MaxText tells by the class which item names to save under, as it does of Orbax's two."""
    with manager_of(world) as manager:
        assert not isinstance(manager, emergency.CheckpointManager)


# Lives of the same loop, as it is written in several years of Orbax.


def train(manager: Any, world: World, last: int, save: Any, restore: Any) -> tuple[int, Any]:
    """(step that it began at, last state)."""
    state, first = world.state(0), 0
    if manager.latest_step() is not None:
        first = manager.latest_step()
        state = restore(manager, first, world.state(0))
        assert same(state, world.state(first))
    for step in range(first + 1, last + 1):
        state = world.state(step)
        save(manager, step, state)
        if manager.reached_preemption(step):
            break
    manager.wait_until_finished()
    return first, state


LOOPS: dict[str, tuple[Any, Any, Any]] = {
    "args": (
        {},
        lambda m, step, state: m.save(step, args=ocp.args.StandardSave(state)),
        lambda m, step, state: m.restore(step, args=ocp.args.StandardRestore(state)),
    ),
    "a checkpointer": (
        {"checkpointers": ocp.PyTreeCheckpointer()},
        lambda m, step, state: m.save(step, state),
        lambda m, step, state: m.restore(
            step,
            items=state,
            restore_kwargs={"restore_args": plain.checkpoint_utils.construct_restore_args(state)},
        ),
    ),
    "handlers": (
        {"item_handlers": plain.PyTreeCheckpointHandler(use_ocdbt=True)},
        lambda m, step, state: m.save(step, args=ocp.args.PyTreeSave(state)),
        lambda m, step, state: m.restore(step, args=ocp.args.PyTreeRestore(state)),
    ),
    "checkpointers by name": (
        {"checkpointers": {"state": ocp.PyTreeCheckpointer()}},
        lambda m, step, state: m.save(step, {"state": state}),
        lambda m, step, state: m.restore(step, items={"state": state})["state"],
    ),
    "items by name": (
        {"item_names": ("state", "config")},
        lambda m, step, state: m.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), config=ocp.args.JsonSave({"lr": step})
            ),
        ),
        lambda m, step, state: (
            m.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state))).state
        ),
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_of_plain_orbax_goes_on_from_ram(world: World, loop: str) -> None:
    how, save, restore = LOOPS[loop]
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)
    with manager_of(world, options=options, **how) as manager:
        assert train(manager, world, 31, save, restore)[0] == 0
    with manager_of(world, options=options, **how) as manager:
        first, _ = train(manager, world, 45, save, restore)
        assert first == 30  # every tenth is in RAM, every twentieth in storage
        assert manager.all_steps() == [20, 40]
    world.lose_ram()
    with manager_of(world, options=options, **how) as manager:
        assert train(manager, world, 46, save, restore)[0] == 40


def test_step_of_one_item_is_one_of_plain_orbax(world: World) -> None:
    state = world.state(7)
    with manager_of(world) as manager:
        assert manager.save(7, args=ocp.args.StandardSave(state), metrics={"loss": np.float32(1)})
        assert isinstance(manager.is_saving_in_progress(), bool)
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        assert manager.metrics(7) == {"loss": 1.0}
        assert manager.item_metadata(7)["w"].shape == (8, 4)
    arrays = {name: value for name, value in state.items() if name != "empty"}
    with plain.CheckpointManager(world.persistent) as manager:
        assert manager.latest_step() == 7
        found = manager.restore(7, args=plain.args.StandardRestore({**arrays, "empty": None}))
    assert same({**found, "empty": state["empty"]}, state)


def test_step_of_plain_orbax_is_where_the_loop_goes_on(world: World) -> None:
    state = {name: value for name, value in world.state(5).items() if name != "empty"}
    with plain.CheckpointManager(world.persistent) as manager:
        manager.save(5, args=plain.args.StandardSave(state))
        manager.wait_until_finished()
    with manager_of(world) as manager:
        assert manager.latest_step() == 5
        assert same(manager.restore(5, args=ocp.args.StandardRestore(state)), state)


def test_iterator_and_json_are_of_the_same_step(world: World) -> None:
    def data() -> Iterator[Any]:
        return iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset())

    iterator = data()
    with manager_of(world) as manager:
        for step in (1, 2):
            next(iterator)
            args = ocp.args.Composite(
                params=ocp.args.PyTreeSave(world.state(step)),
                opt=ocp.args.PyTreeSave({"mu": np.full(3, step)}),
                iter=grain.PyGrainCheckpointSave(iterator),
                config=ocp.args.JsonSave({"at": step}),
            )
            assert manager.save(step, args=args)
        manager.wait_until_finished()
    following, again = next(iterator), data()
    args = ocp.args.Composite(
        params=ocp.args.PyTreeRestore(world.state(0)),
        opt=ocp.args.PyTreeRestore({"mu": np.zeros(3, int)}),
        iter=grain.PyGrainCheckpointRestore(again),
        config=ocp.args.JsonRestore(),
    )
    with manager_of(world) as manager:
        found = manager.restore(manager.latest_step(), args=args)
        assert same(found.params, world.state(2))
        assert same(found.opt, {"mu": np.full(3, 2)})
        assert found.config == {"at": 2}
        assert next(again) == following
        missing = ocp.args.Composite(**dict(args.items()), more=ocp.args.JsonRestore())
        with pytest.raises(KeyError, match="was not found in the checkpoint"):
            manager.restore(2, args=missing)


class HiveNames:
    """A format of the kind that is not followed."""

    def build_name(self, step: int) -> str:
        return f"step={step}"


REFUSED_OPTIONS = [
    {"step_name_format": HiveNames()},
    {"step_prefix": "step=0/"},
    {"todelete_full_path": "trash"},
    {"file_options": plain.options.FileOptions(path_permission_mode=0o750)},
    {"atomicity_options": object()},
    {"temporary_path_class": plain.path.atomicity.DeferredWritableTemporaryPath},
    {"multiprocessing_options": plain.options.MultiprocessingOptions(primary_host=1)},
]


@pytest.mark.parametrize("options", REFUSED_OPTIONS, ids=lambda options: next(iter(options)))
def test_option_that_cannot_be_followed_is_refused(world: World, options: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*: .*"):
        manager_of(world, options=plain.CheckpointManagerOptions(**options))
    assert not world.persistent.exists()


STANDARD = plain.path.step.standard_name_format(step_prefix="ckpt", step_format_fixed_length=5)
NAMES = {
    "prefix and padding": {"step_prefix": "ckpt", "step_format_fixed_length": 5},
    "a format": {"step_name_format": STANDARD},
    "a composite": {
        "step_name_format": plain.path.step.composite_name_format(
            STANDARD, [STANDARD, plain.path.step.standard_name_format()]
        )
    },
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_step_names_change_and_all_steps_are_read(world: World, names: Any) -> None:
    def save(step: int, **options: Any) -> None:
        with manager_of(world, options=ocp.CheckpointManagerOptions(**options)) as manager:
            args = ocp.args.StandardSave({"w": np.full(3, step)})
            manager.save(step, args=args, metrics={"at": step}, custom_metadata={"of": step})

    with plain.CheckpointManager(world.persistent) as orbaxs:
        orbaxs.save(0, args=plain.args.StandardSave({"w": np.full(3, 0)}))
    save(1)
    save(2, **names)
    assert (world.persistent / "ckpt_00002" / "default").exists()
    with manager_of(world, options=ocp.CheckpointManagerOptions(**names)) as manager:
        assert manager.all_steps() == [0, 1, 2]
        for step in (0, 1, 2):
            assert same(manager.restore(step), {"w": np.full(3, step)})
            assert manager.metrics(step) == ({"at": step} if step else None)
    with plain.CheckpointManager(
        world.persistent, options=plain.CheckpointManagerOptions(**names)
    ) as orbaxs:
        assert same(orbaxs.restore(2), {"w": np.full(3, 2)})
        assert orbaxs.metadata(2).custom_metadata["of"] == 2


def test_drained_step_has_what_orbax_was_given(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends before its first save to storage; then Orbax reads the step."""
    wanted = {"params": {"w": np.arange(4)}, "opt": {"mu": np.full(3, 0.5)}}
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], settings={"save_every": 0}, **NAMES["a format"]
    )
    with manager_of(world, options=options, item_names=("params", "opt")) as manager:
        saved = {name: ocp.args.StandardSave(tree) for name, tree in wanted.items()}
        manager.save(
            0,
            args=ocp.args.Composite(**saved),
            metrics={"loss": 0.25},
            custom_metadata={"of": [1, "a"]},
        )
    assert not list(world.persistent.glob("ckpt*"))
    code, found = Drains(world, capsys).drain("--run-id", run_id_of(str(world.persistent)))
    assert (code, found["step"], found["is_written"]) == (0, 0, True)
    theirs = plain.CheckpointManagerOptions(best_fn=options.best_fn, **NAMES["a format"])
    with plain.CheckpointManager(world.persistent, options=theirs) as orbaxs:
        assert orbaxs.all_steps() == [0]
        assert orbaxs.best_step() == 0
        assert orbaxs.metrics(0) == {"loss": 0.25}
        assert orbaxs.metadata(0).metrics == {"loss": 0.25}
        assert orbaxs.metadata(0).custom_metadata["of"] == [1, "a"]
        read = plain.args.StandardRestore()
        restored = orbaxs.restore(0, args=plain.args.Composite(params=read, opt=read))
        assert same(dict(restored.items()), wanted)
    # The job goes on from RAM, and from storage.
    with manager_of(world, options=ocp.CheckpointManagerOptions(**NAMES["a format"])) as manager:
        assert manager.metrics(0) == {"loss": 0.25}
        assert same(manager.restore(0).params, {"w": np.arange(4)})


def test_removed_steps_go_where_they_are_wanted(world: World) -> None:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, todelete_subdir="old/ttl=1h", step_prefix="ckpt"
    )
    with manager_of(world, options=options) as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
        manager.wait_until_finished()
        manager.delete(2)
        assert manager.all_steps() == [3]
    removed = world.persistent / "old" / "ttl=1h"
    assert {path.name for path in removed.iterdir()} == {"ckpt_0", "ckpt_1", "ckpt_2"}
    assert not (world.persistent / "host_state" / "2").exists()
    orbaxs_options = plain.CheckpointManagerOptions(step_prefix="ckpt")
    with plain.CheckpointManager(removed, options=orbaxs_options) as orbaxs:
        assert same(orbaxs.restore(1), {"w": np.full(3, 1)})


def test_option_that_asks_for_what_is_done_is_taken(world: World) -> None:
    options = ocp.CheckpointManagerOptions(
        step_name_format=plain.path.step.standard_name_format(),
        temporary_path_class=plain.path.atomicity.CommitFileTemporaryPath,
        prevent_write_metrics=True,
        save_root_metadata=False,
    )
    with manager_of(world, options=options, metadata={"run": 7}) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.arange(3)}), metrics={"loss": 1.0})
    assert (world.persistent / "1" / "commit_success.txt").exists()
    assert not (world.persistent / "1" / "metrics").exists()
    assert not (world.persistent / "metadata").exists()


def test_option_without_effect_is_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    options = ocp.CheckpointManagerOptions(lightweight_initialize=True)
    with caplog.at_level(logging.WARNING), manager_of(world, options=options):
        assert "without effect: lightweight_initialize" in caplog.text


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m, state: m.save(1), "Must provide `args`"),
        (lambda m, state: m.save(1, state, args=ocp.args.StandardSave(state)), "not both"),
        (lambda m, state: m.save(1, ocp.args.StandardSave(state)), "specify the argument keyword"),
        (lambda m, state: m.save(1, args=state), "Expected args of type `CheckpointArgs`"),
    ],
)
def test_what_cannot_be_done_is_a_value_error(world: World, call: Any, problem: str) -> None:
    with manager_of(world) as manager, pytest.raises(ValueError, match=problem):
        call(manager, world.state(1))


def test_read_only_manager_saves_nothing(world: World) -> None:
    with manager_of(world) as manager:
        manager.save(1, args=ocp.args.StandardSave(world.state(1)))
    with manager_of(world, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert not manager.save(2, args=ocp.args.StandardSave(world.state(2)))
        assert not manager.save(2, args=ocp.args.StandardSave(world.state(2)), force=True)
        restored = manager.restore(None, args=ocp.args.StandardRestore(world.state(0)))
        assert same(restored, world.state(1))


def test_relative_directory_is_that_of_the_program(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with ocp.CheckpointManager("run") as manager:
        manager.save(1, args=ocp.args.StandardSave(world.state(1)))
    assert (tmp_path / "run" / "1" / "default").is_dir()


# What was saved completes what a restore is not told.


@pytest.fixture(params=["RAM", "storage"])
def lose(request: pytest.FixtureRequest, world: World) -> Any:
    """Leave the copies of one tier alone; RAM's is newer than storage, which has the structure."""

    def lost(save: Any) -> int:
        options = ocp.CheckpointManagerOptions(save_interval_steps=20)
        with manager_of(world, options=options) as manager:
            for step in (0, 10):
                save(manager, step)
        if request.param == "storage":
            world.lose_ram()
            return 0
        return 10

    return lost


def test_restore_without_a_state_is_as_it_was_saved(world: World, lose: Any) -> None:
    state = {name: value for name, value in world.state(3).items() if name != "empty"}
    step = lose(lambda m, n: m.save(n, args=ocp.args.PyTreeSave(state)))
    with manager_of(world) as manager:
        for args in (None, ocp.args.PyTreeRestore()):
            found = manager.restore(step, args=args)
            assert same(found, state)
            assert found["w"].sharding == state["w"].sharding


def test_items_are_restored_whole_or_one_alone(world: World, lose: Any) -> None:
    opt = {"mu": np.arange(3)}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave({"w": world.state(3)["w"]}),
        opt=ocp.args.PyTreeSave(opt),
        arr=ocp.args.ArraySave(np.arange(4)),
        config=ocp.args.JsonSave({"lr": 1}),
    )
    step = lose(lambda m, n: m.save(n, args=items))
    with manager_of(world) as manager:
        every = manager.restore(step)
        assert set(every.keys()) == {"params", "opt", "arr", "config"}
        assert (every.config, list(every.arr), list(every.opt["mu"])) == (
            {"lr": 1},
            [0, 1, 2, 3],
            [0, 1, 2],
        )
        one = manager.restore(step, args=ocp.args.Composite(opt=ocp.args.PyTreeRestore(opt)))
        assert same(one.opt, opt)
        assert set(one.keys()) == {"opt"}
    with plain.CheckpointManager(world.persistent) as manager:
        theirs = manager.restore(0)
    assert (theirs.config, list(theirs.arr)) == ({"lr": 1}, [0, 1, 2, 3])
    assert same(theirs.opt, opt)


def test_item_without_arrays_is_saved_alone(world: World, lose: Any) -> None:
    step = lose(lambda m, n: m.save(n, args=ocp.args.JsonSave({"at": n})))
    with manager_of(world) as manager:
        assert manager.restore(step, args=ocp.args.JsonRestore()) == {"at": step}


def test_placeholder_and_partial_restore_leave_leaves_out(world: World, lose: Any) -> None:
    state = {"a": np.arange(3), "b": {"c": np.arange(4), "d": np.float32(2)}}
    step = lose(lambda m, n: m.save(n, args=ocp.args.PyTreeSave(state)))
    hole = plain.PLACEHOLDER
    with manager_of(world) as manager:
        wanted = {"a": hole, "b": {"c": 0, "d": hole}}
        found = manager.restore(step, args=ocp.args.PyTreeRestore(wanted))
        assert found["a"] is hole
        assert list(found["b"]["c"]) == [0, 1, 2, 3]
        part = ocp.args.PyTreeRestore({"b": {"d": 0}}, partial_restore=True)
        assert same(manager.restore(step, args=part), {"b": {"d": np.full((), 2, np.float32)}})
        new = jax.ShapeDtypeStruct((2,), np.int32)
        part = ocp.args.PyTreeRestore({"a": 0, "new": new}, partial_restore=True)
        assert manager.restore(step, args=part)["new"] is new, "as Orbax: it was not saved"
        with pytest.raises(ValueError, match="on-disk value"):
            manager.restore(step, args=ocp.args.PyTreeRestore({"a": 0}))


def test_older_parameters_take_what_their_handlers_take(world: World) -> None:
    checkpointers = {
        "params": ocp.PyTreeCheckpointer(),
        "config": plain.Checkpointer(plain.JsonCheckpointHandler()),
    }
    params = {"w": np.arange(3)}
    with manager_of(world, checkpointers) as manager:
        assert manager.save(0, {"params": params, "config": {"lr": 1}})
        found = manager.restore(0, items={"params": params, "config": None})
    assert found["config"] == {"lr": 1}
    assert same(found["params"], params)


def test_step_that_exists_is_an_error_by_force(world: World) -> None:
    args = ocp.args.StandardSave({"w": np.arange(3)})
    with manager_of(world) as manager:
        assert manager.save(0, args=args, force=True)
        with pytest.raises(ValueError, match="already exists"):
            manager.save(0, args=args, force=True)


def test_metadata_and_metrics_are_those_of_orbax(world: World) -> None:
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with manager_of(world, options=best, metadata={"run": 7}) as manager:
        for step, loss in ((0, 1.0), (1, 3.0)):
            manager.save(
                step,
                args=ocp.args.StandardSave({"w": np.arange(3)}),
                metrics={"loss": loss},
                custom_metadata={"note": step},
            )
        manager.wait_until_finished()
        assert manager.metadata(1).custom_metadata == {"note": 1}
        assert manager.best_step() == 0
    for kind in (ocp, plain):
        options = kind.CheckpointManagerOptions(best_fn=best.best_fn, best_mode="min")
        with kind.CheckpointManager(world.persistent, options=options) as manager:
            assert manager.metadata().custom_metadata == {"run": 7}
            assert manager.best_step() == 0
            assert manager.metrics(1) == {"loss": 3.0}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("last", [float("nan"), float("inf"), -float("inf")])
def test_metric_that_is_no_number_is_of_no_best_step(
    world: World, mode: Literal["min", "max"], last: float
) -> None:
    """A negated one, too, of which the step log has null after a restart."""
    best = ocp.CheckpointManagerOptions(best_fn=lambda found: -found["loss"], best_mode=mode)
    with manager_of(world, options=best) as manager:
        for step, loss in enumerate((float("nan"), 1.0, 3.0, last)):
            args = ocp.args.StandardSave({"w": np.arange(3)})
            manager.save(step, args=args, metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == {"min": 2, "max": 1}[mode]
    with ocp.CheckpointManager(world.persistent, options=best) as manager:
        assert manager.best_step() == {"min": 2, "max": 1}[mode]


def test_item_of_another_kind_than_its_handler_is_refused(world: World) -> None:
    handlers = {"params": plain.PyTreeCheckpointHandler()}
    args = ocp.args.Composite(params=ocp.args.StandardSave({"w": np.arange(3)}))
    with (
        manager_of(world, item_handlers=handlers) as manager,
        pytest.raises(ValueError, match="does not match with any registered handler"),
    ):
        manager.save(0, args=args)


# Save policies.


def test_continuous_policy_saves_each_step_it_can(world: World) -> None:
    policy = plain.checkpoint_managers.ContinuousCheckpointingPolicy()
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=policy, enable_async_checkpointing=False
    )
    args = ocp.args.StandardSave({"w": np.arange(3)})
    with manager_of(world, options=options) as manager:
        assert [manager.save(step, args=args) for step in range(6)] == [True] * 6
        assert manager.all_steps() == list(range(6))


def test_continuous_policy_keeps_its_minimum_interval(world: World) -> None:
    policy = plain.checkpoint_managers.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=policy, enable_async_checkpointing=False
    )
    args = ocp.args.StandardSave({"w": np.arange(3)})
    with manager_of(world, options=options) as manager:
        assert [manager.save(step, args=args) for step in range(4)] == [True, False, False, False]


def test_ram_follows_policies_of_the_step_alone(world: World) -> None:
    managers = plain.checkpoint_managers
    policies = [managers.FixedIntervalPolicy(20), managers.SpecificStepsPolicy(steps=[4])]
    options = ocp.CheckpointManagerOptions(save_decision_policy=managers.AnySavePolicy(policies))
    args = ocp.args.StandardSave({"w": np.arange(3)})
    with manager_of(world, options=options) as manager:
        assert [n for n in range(1, 21) if manager.save(n, args=args)] == [4, 10, 20]
        assert manager.all_steps() == [4, 20]


# Handlers, and what plain Orbax has written by them.


class Reversed(plain.CheckpointHandler):
    """Writes a tree of one number in a format of its own."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "backwards").write_text(str(args.item["n"])[::-1])

    def restore(self, directory: Any, args: Any) -> Any:
        return {"n": int((directory / "backwards").read_text()[::-1])}


def registry() -> Any:
    found = plain.DefaultCheckpointHandlerRegistry()
    handler = Reversed()
    for kind in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        found.add("odd", kind, handler)
    return found


def test_item_of_a_handler_of_ones_own_is_in_its_format(world: World) -> None:
    args = ocp.args.Composite(
        odd=ocp.args.PyTreeSave({"n": 123}), params=ocp.args.PyTreeSave({"w": np.arange(3)})
    )
    wanted = ocp.args.Composite(odd=ocp.args.PyTreeRestore())
    with manager_of(world, handler_registry=registry()) as manager:
        assert manager.save(1, args=args)
        assert manager.restore(1, args=wanted).odd == {"n": 123}
    assert (world.persistent / "1" / "odd" / "backwards").read_text() == "321"
    with plain.CheckpointManager(world.persistent, handler_registry=registry()) as manager:
        assert manager.restore(1, args=wanted).odd == {"n": 123}


def test_every_item_of_plain_orbax_is_restored_unasked(world: World) -> None:
    args = ocp.args.Composite(
        params=ocp.args.StandardSave({"w": np.arange(3)}), config=ocp.args.JsonSave({"lr": 1})
    )
    with plain.CheckpointManager(world.persistent) as manager:
        manager.save(1, args=args, metrics={"loss": 1.0})
        manager.wait_until_finished()
    with manager_of(world) as manager:
        found = manager.restore(1)
        assert found.config == {"lr": 1}
        assert same(found.params, {"w": np.arange(3)})
        assert manager.item_metadata(1).params["w"].shape == (3,)


def test_item_of_restore_args_is_a_structure_alone(world: World) -> None:
    state = {"w": world.state(3)["w"]}
    structure = plain.checkpoint_utils.construct_restore_args(state)
    bare = {"w": plain.ArrayRestoreArgs(sharding=structure["w"].sharding)}
    with manager_of(world) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        assert same(manager.restore(1, args=ocp.args.PyTreeRestore(bare)), state)


@pytest.mark.parametrize(
    "args_of",
    [
        lambda spec: ocp.args.StandardRestore({"w": spec}, support_layout=True),
        lambda spec: ocp.args.PyTreeRestore(
            restore_args={"w": plain.ArrayRestoreArgs(sharding=spec.format)}
        ),
    ],
)
def test_layout_on_the_devices_is_that_of_the_target(world: World, args_of: Any) -> None:
    w = world.state(1)["w"]
    turned = Format(Layout((1, 0)), w.sharding)
    spec = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=turned)
    with manager_of(world) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": w}))
        manager.wait_until_finished()
        found = manager.restore(1, args=args_of(spec))
    assert_same(found, {"w": jax.device_put(w, turned)})


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda m, w: m.save(2, args=ocp.args.StandardSave({"w": w}, custom_metadata={"a": 1})),
            r"custom_metadata.*save\(custom_metadata",
        ),
        (
            lambda m, w: m.restore(1, args=ocp.args.StandardRestore(fallback_sharding=w.sharding)),
            "fallback_sharding.*shardings",
        ),
        (
            lambda m, w: m.restore(
                1,
                args=ocp.args.PyTreeRestore(
                    restore_args={"w": plain.ArrayRestoreArgs(global_shape=(2, 2))}
                ),
            ),
            "global_shape.*pad or cut",
        ),
    ],
)
def test_argument_that_is_not_followed_is_refused(world: World, call: Any, problem: str) -> None:
    w = world.state(1)["w"]
    with manager_of(world) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": w}))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=problem):
            call(manager, w)
