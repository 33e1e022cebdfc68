"""``emergency_ckpt.orbax.checkpoint``: the loop of plain Orbax, its names and its arguments."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import grain.python as grain
import jax
import numpy as np
import orbax.checkpoint as plain
import pytest
from drains import Drains
from jax.experimental.layout import Format, Layout
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbaxs_emergency
from places import ROOT
from state_samples import assert_same
from world import World, same

import emergency_ckpt.orbax.checkpoint as ocp
from emergency_ckpt import orbax as emergency
from emergency_ckpt.config import run_id_of
from emergency_ckpt.events import Event
from emergency_ckpt.orbax import v1


@pytest.fixture(autouse=True)
def ramdisk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the RAM tier is when the loop says nothing of it."""
    monkeypatch.setenv("ECKPT_LOCAL_DIR", str(world.ramdisk))


def options_of(**options: Any) -> ocp.CheckpointManagerOptions:
    """Storage has the first step and each twentieth, RAM each tenth, unless told otherwise."""
    settings = {"local_save_every": 10, **options.pop("settings", {})}
    options = {"save_interval_steps": 20, **options}
    return ocp.CheckpointManagerOptions(**options, settings=settings)


def manager_of(world: World, *given: Any, **more: Any) -> Any:
    more.setdefault("options", options_of())
    return ocp.CheckpointManager(world.persistent, *given, **more)


def state_of(world: World, step: int) -> dict[str, Any]:
    """The state of a step, without the array that Orbax cannot write."""
    return {name: leaf for name, leaf in world.state(step).items() if name != "empty"}


def test_every_other_name_is_orbaxs_own() -> None:
    ours = {"CheckpointManager", "CheckpointManagerOptions"}
    modules = {"checkpoint_manager", "checkpoint_managers", "v1"}
    names = {name for name in dir(plain) if not name.startswith("_")} - ours - modules
    assert names >= {"args", "PyTreeCheckpointer", "utils", "AsyncOptions"}
    assert [name for name in names if getattr(ocp, name) is not getattr(plain, name)] == []
    with pytest.raises(AttributeError):
        ocp.no_such_name  # noqa: B018


def places_of_class(kind: type, module: ModuleType, name: str = "") -> Iterator[str]:
    """Yield the dotted names below ``module`` by which ``kind`` can be had."""
    for key in (key for key in dir(module) if not key.startswith("_")):
        value = getattr(module, key, None)
        if value is kind:
            yield name + key
        if isinstance(value, ModuleType) and value.__name__.startswith(f"{module.__name__}."):
            yield from places_of_class(kind, value, f"{name}{key}.")


@pytest.mark.parametrize(
    ("orbaxs", "ours"),
    [
        (plain.CheckpointManager, ocp.CheckpointManager),
        (plain.CheckpointManagerOptions, ocp.CheckpointManagerOptions),
        (plain.v1.training.Checkpointer, v1.training.Checkpointer),
        (orbaxs_emergency.CheckpointManager, None),
    ],
)
def test_class_of_orbaxs_is_had_where_the_page_says(orbaxs: type, ours: type | None) -> None:
    page = (ROOT / "docs" / "migrating_orbax.md").read_text()
    places = list(places_of_class(orbaxs, plain))
    assert places
    for place in places:
        found = operator.attrgetter(place)(ocp)
        is_named = f"`{place.rsplit('.', 1)[0]}`" in page
        assert found is ours or is_named, place


def test_manager_has_orbaxs_methods_and_arguments(world: World) -> None:
    names = [name for name in dir(plain.CheckpointManager) if not name.startswith("_")]
    with manager_of(world) as manager, plain.CheckpointManager(world.persistent) as orbaxs:
        for name in names:
            theirs, mine = getattr(orbaxs, name), getattr(manager, name)
            if callable(theirs):
                known, wanted = (inspect.signature(each).parameters for each in (mine, theirs))
                assert list(known)[: len(wanted)] == list(wanted), name
        with pytest.raises(AttributeError):
            manager._private  # noqa: B018
    known = inspect.signature(ocp.CheckpointManager).parameters
    assert list(known) == list(inspect.signature(plain.CheckpointManager).parameters)


def test_manager_is_none_of_the_emergency_ones(world: World) -> None:
    """MaxText tells by the class which item names to save under, as it does of Orbax's two."""
    with manager_of(world) as manager:
        assert not isinstance(manager, emergency.CheckpointManager)


# Lives of the same loop, as it is written in several years of Orbax.


def train(manager: Any, world: World, last: int, save: Any, restore: Any) -> tuple[int, Any]:
    """(step that it began at, last state)."""
    state, first = state_of(world, 0), 0
    if manager.latest_step() is not None:
        first = manager.latest_step()
        state = restore(manager, first, state_of(world, 0))
        assert same(state, state_of(world, first))
    for step in range(first + 1, last + 1):
        state = state_of(world, step)
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
    options = options_of(max_to_keep=2)
    with manager_of(world, options=options, **how) as manager:
        assert train(manager, world, 31, save, restore)[0] == 0
    with manager_of(world, options=options, **how) as manager:
        first, _ = train(manager, world, 45, save, restore)
        assert first == 30  # every tenth is in RAM, every twentieth in storage
        assert manager.all_steps() == [20, 40]
    world.lose_ram()
    with manager_of(world, options=options, **how) as manager:
        assert train(manager, world, 46, save, restore)[0] == 40


def test_iterator_and_json_are_of_the_same_step(world: World) -> None:
    def data() -> Iterator[Any]:
        return iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset())

    iterator = data()
    with manager_of(world) as manager:
        for step in (0, 10):
            next(iterator)
            args = ocp.args.Composite(
                params=ocp.args.PyTreeSave(state_of(world, step)),
                opt=ocp.args.PyTreeSave({"mu": np.full(3, step)}),
                iter=grain.PyGrainCheckpointSave(iterator),
                config=ocp.args.JsonSave({"at": step}),
            )
            assert manager.save(step, args=args)
        manager.wait_until_finished()
    following, again = next(iterator), data()
    args = ocp.args.Composite(
        params=ocp.args.PyTreeRestore(state_of(world, 0)),
        opt=ocp.args.PyTreeRestore({"mu": np.zeros(3, int)}),
        iter=grain.PyGrainCheckpointRestore(again),
        config=ocp.args.JsonRestore(),
    )
    with manager_of(world) as manager:
        assert manager.latest_step() == 10
        found = manager.restore(10, args=args)
        assert same(found.params, state_of(world, 10))
        assert same(found.opt, {"mu": np.full(3, 10)})
        assert found.config == {"at": 10}
        assert next(again) == following
        arrays = {name: value for name, value in args.items() if name in ("params", "opt")}
        assert set(manager.restore(10, args=ocp.args.Composite(**arrays)).keys()) == {
            "params",
            "opt",
        }
        missing = ocp.args.Composite(**dict(args.items()), more=ocp.args.JsonRestore())
        with pytest.raises(ValueError, match=r"step 10 is in RAM alone.*'more'"):
            manager.restore(10, args=missing)


class HiveNames(plain.path.step.NameFormat[Any]):
    """A format of a user's own."""

    def build_name(self, step: int) -> str:
        return f"step={step}"

    def find_step(self, base_path: Any, step: int) -> Any:
        found = [each for each in self.find_all(base_path) if each.step == step]
        if not found:
            raise ValueError(f"no step {step}")
        return found[0]

    def find_all(self, base_path: Any) -> Any:
        return [
            plain.path.step.Metadata(step=int(path.name.partition("=")[2]), path=path)
            for path in base_path.iterdir()
            if path.name.startswith("step=") and "tmp" not in path.name
        ]


NAMES: dict[str, dict[str, Any]] = {
    "prefix and padding": {"step_prefix": "ckpt", "step_format_fixed_length": 5},
    "a format": {"step_name_format": HiveNames()},
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names_of_steps_are_orbaxs(world: World, names: Any) -> None:
    state = {"w": np.arange(3)}
    with manager_of(world, options=options_of(**names)) as manager:
        for step in (0, 10, 20, 30):
            manager.save(step, args=ocp.args.StandardSave(state))
    orbaxs = plain.CheckpointManagerOptions(**names)
    with plain.CheckpointManager(world.persistent, options=orbaxs) as manager:
        assert manager.all_steps() == [0, 20]
    with manager_of(world, options=options_of(**names)) as manager:
        assert manager.all_steps() == [0, 20]
        assert manager.latest_step() == 30
        assert same(manager.restore(30), state)


def test_drained_step_has_what_orbax_was_given(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends before its first save to storage; then Orbax reads the step."""
    wanted = {"params": {"w": np.arange(4)}, "opt": {"mu": np.full(3, 0.5)}}
    options = options_of(should_save_fn=lambda step, latest: False)
    with manager_of(world, options=options, item_names=("params", "opt")) as manager:
        saved = {name: ocp.args.StandardSave(tree) for name, tree in wanted.items()}
        manager.save(
            0,
            args=ocp.args.Composite(**saved),
            metrics={"loss": 0.25},
            custom_metadata={"of": [1, "a"]},
        )
    code, found = Drains(world, capsys).drain("--run-id", run_id_of(str(world.persistent)))
    assert (code, found["step"], found["is_written"]) == (0, 0, True)
    theirs = plain.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with plain.CheckpointManager(world.persistent, options=theirs) as orbaxs:
        assert orbaxs.all_steps() == [0]
        assert orbaxs.best_step() == 0
        assert orbaxs.metadata(0).custom_metadata["of"] == [1, "a"]
        read = plain.args.StandardRestore()
        restored = orbaxs.restore(0, args=plain.args.Composite(params=read, opt=read))
        assert same(dict(restored.items()), wanted)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m, state: m.save(1), "Must provide `args`"),
        (lambda m, state: m.save(1, ocp.args.StandardSave(state)), "specify the argument keyword"),
        (lambda m, state: m.save(1, args=state), "Expected args of type `CheckpointArgs`"),
    ],
)
def test_what_cannot_be_done_is_a_value_error(world: World, call: Any, problem: str) -> None:
    with manager_of(world) as manager, pytest.raises(ValueError, match=problem):
        call(manager, state_of(world, 1))


def test_read_only_manager_has_no_ram(world: World) -> None:
    with manager_of(world) as manager:
        for step in (0, 10):
            manager.save(step, args=ocp.args.StandardSave(state_of(world, step)))
    with manager_of(world, options=options_of(read_only=True)) as manager:
        assert not manager.save(20, args=ocp.args.StandardSave(state_of(world, 20)))
        restored = manager.restore(None, args=ocp.args.StandardRestore(state_of(world, 1)))
        assert same(restored, state_of(world, 0))


def test_job_of_one_process_has_no_ram_unasked(world: World) -> None:
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with manager_of(world, options=options) as manager:
        saved = [manager.save(n, args=ocp.args.StandardSave({"w": np.ones(2)})) for n in range(3)]
    assert saved == [True, False, True]
    assert not world.ramdisk.exists()


# What was saved completes what a restore is not told.


@pytest.fixture(params=["RAM", "storage"])
def lose(request: pytest.FixtureRequest, world: World) -> Any:
    """Leave the copies of one tier alone; RAM's is newer than storage, which has the structure."""

    def lost(save: Any) -> int:
        with manager_of(world) as manager:
            for step in (0, 10):
                save(manager, step)
        if request.param == "storage":
            world.lose_ram()
            return 0
        return 10

    return lost


def test_restore_without_a_state_is_as_it_was_saved(world: World, lose: Any) -> None:
    keys = jax.device_put(jax.random.key(7), state_of(world, 3)["step"].sharding)
    state = {**state_of(world, 3), "keys": keys}
    step = lose(lambda m, n: m.save(n, args=ocp.args.PyTreeSave(state)))
    with manager_of(world) as manager:
        for args in (None, ocp.args.PyTreeRestore()):
            found = manager.restore(step, args=args)
            assert same(found, state)
            assert found["w"].sharding == state["w"].sharding
        assert same(manager.restore(None), state)


def test_items_are_restored_whole_or_one_alone(world: World, lose: Any) -> None:
    opt = {"mu": np.arange(3)}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave({"w": world.state(3)["w"]}),
        opt=ocp.args.PyTreeSave(opt),
        config=ocp.args.JsonSave({"lr": (1,)}),
    )
    step = lose(lambda m, n: m.save(n, args=items))
    with manager_of(world) as manager:
        every = manager.restore(step)
        assert set(every.keys()) == {"params", "opt", "config"}
        assert (every.config, list(every.opt["mu"])) == ({"lr": [1]}, [0, 1, 2])
        one = manager.restore(step, args=ocp.args.Composite(opt=ocp.args.PyTreeRestore(opt)))
        assert same(one.opt, opt)
        assert set(one.keys()) == {"opt"}


UNFIT: dict[str, Any] = {
    "a text": ocp.args.PyTreeSave({"w": np.arange(3), "name": "bert"}),
    "no arrays": ocp.args.JsonSave({"lr": 1}),
    "an array alone": ocp.args.ArraySave(np.arange(4)),
    "a cast": ocp.args.PyTreeSave(
        {"w": np.ones(3, np.float32)}, save_args={"w": plain.SaveArgs(dtype=np.dtype(np.float16))}
    ),
}


@pytest.mark.parametrize("args", UNFIT.values(), ids=UNFIT)
def test_item_that_ram_cannot_keep_is_storages_alone(world: World, args: Any) -> None:
    options = options_of(save_interval_steps=2, settings={"on_event": world.events.append})
    with manager_of(world, options=options) as manager:
        saved = [manager.save(step, args=args) for step in range(0, 31)]
        assert [step for step, is_saved in enumerate(saved) if is_saved] == list(range(0, 31, 2))
        manager.wait_until_finished()
        assert manager.latest_step() == 30
    assert len(world.named("save.skipped", cause="unfit")) == 1
    assert not world.named("save.started")


def test_placeholder_and_partial_restore_leave_leaves_out(world: World, lose: Any) -> None:
    state = {"a": np.arange(3), "b": {"c": np.arange(4), "d": np.arange(2)}}
    step = lose(lambda m, n: m.save(n, args=ocp.args.PyTreeSave(state)))
    hole = plain.PLACEHOLDER
    with manager_of(world) as manager:
        wanted = {"a": hole, "b": {"c": 0, "d": hole}}
        found = manager.restore(step, args=ocp.args.PyTreeRestore(wanted))
        assert found["a"] is hole
        assert list(found["b"]["c"]) == [0, 1, 2, 3]
        part = ocp.args.PyTreeRestore({"b": {"d": 0}}, partial_restore=True)
        assert same(manager.restore(step, args=part), {"b": {"d": np.arange(2)}})
        new = jax.ShapeDtypeStruct((2,), np.int32)
        part = ocp.args.PyTreeRestore({"a": 0, "new": new}, partial_restore=True)
        assert manager.restore(step, args=part)["new"] is new, "as Orbax: it was not saved"
        with pytest.raises(ValueError, match=r"on-disk|differ"):
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


def test_metadata_of_a_step_in_ram_is_as_in_storage(world: World) -> None:
    with manager_of(world, metadata={"run": 7}) as manager:
        for step in (0, 10):
            args = ocp.args.StandardSave(state_of(world, step))
            manager.save(step, args=args, metrics={"loss": 1.0}, custom_metadata={"note": step})
        manager.wait_until_finished()
        assert manager.latest_step() == 10
        assert manager.all_steps() == [0]
        assert manager.item_metadata(10)["w"].shape == (8, 4)
        assert manager.metadata(10).custom_metadata == {"note": 10}
        assert manager.metadata(10).metrics == {"loss": 1.0}
        assert manager.metadata(0).custom_metadata == {"note": 0}
        assert manager.metadata().custom_metadata == {"run": 7}


def test_item_metadata_after_a_restore_from_ram_waits_for_orbax(world: World) -> None:
    """Orbax takes a handler without a name from the arguments of its own saves and restores."""
    state = state_of(world, 0)
    with manager_of(world) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    with manager_of(world) as manager:
        assert same(manager.restore(0, args=ocp.args.StandardRestore(state)), state)
        assert manager.item_metadata(0) is None
        manager.save(20, args=ocp.args.StandardSave(state))
        assert set(manager.item_metadata(0).keys()) == set(state)


@pytest.mark.parametrize("is_async", [True, False])
def test_save_waits_for_ram_where_orbax_saves_synchronously(world: World, is_async: bool) -> None:
    may_end = threading.Event()

    def listen(event: Event) -> None:
        if event.point == "save.stage.copied":
            may_end.wait(1.0)
        world.events.append(event)

    options = options_of(
        enable_async_checkpointing=is_async, settings={"local_save_every": 1, "on_event": listen}
    )
    with manager_of(world, options=options) as manager:
        assert manager.save(1, args=ocp.args.StandardSave(state_of(world, 1)))
        assert bool(world.named("save.complete", step=1)) is not is_async
        may_end.set()


def test_ram_is_saved_whatever_storage_decides(world: World) -> None:
    managers = plain.checkpoint_managers
    options = options_of(
        save_interval_steps=1,
        save_decision_policy=managers.SpecificStepsPolicy(steps=[4, 20]),
        settings={"local_save_every": 5},
    )
    args = ocp.args.StandardSave({"w": np.arange(3)})
    with manager_of(world, options=options) as manager:
        assert [n for n in range(1, 21) if manager.save(n, args=args)] == [4, 5, 10, 15, 20]
        manager.wait_until_finished()
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


def test_item_of_a_handler_of_ones_own_is_storages_alone(world: World) -> None:
    args = ocp.args.Composite(
        odd=ocp.args.PyTreeSave({"n": 123}), params=ocp.args.PyTreeSave({"w": np.arange(3)})
    )
    wanted = ocp.args.Composite(odd=ocp.args.PyTreeRestore())
    with manager_of(world, handler_registry=registry()) as manager:
        assert manager.save(0, args=args)
        assert not manager.save(10, args=args)
        manager.wait_until_finished()
        assert manager.restore(0, args=wanted).odd == {"n": 123}
    assert (world.persistent / "0" / "odd" / "backwards").read_text() == "321"


def test_item_of_restore_args_is_a_structure_alone(world: World) -> None:
    state = {"w": world.state(3)["w"]}
    structure = plain.checkpoint_utils.construct_restore_args(state)
    bare = {"w": plain.ArrayRestoreArgs(sharding=structure["w"].sharding)}
    with manager_of(world) as manager:
        for step in (0, 10):
            manager.save(step, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
        assert same(manager.restore(10, args=ocp.args.PyTreeRestore(bare)), state)


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
        for step in (0, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": w}))
        manager.wait_until_finished()
        found = manager.restore(10, args=args_of(spec))
    assert_same(found, {"w": jax.device_put(w, turned)})


@pytest.mark.parametrize(
    "args",
    [
        ocp.args.PyTreeRestore(restore_args={"w": plain.ArrayRestoreArgs(global_shape=(2, 2))}),
        ocp.args.PyTreeRestore({"w": np.zeros(3), "other": np.zeros(3)}),
        ocp.args.JsonRestore(),
    ],
    ids=["a shape", "a leaf", "a kind"],
)
def test_request_that_ram_cannot_meet_is_storages(world: World, args: Any) -> None:
    """Of a step in RAM alone it is an error."""
    with manager_of(world) as manager:
        for step in (0, 10):
            manager.save(step, args=ocp.args.PyTreeSave({"w": world.state(step)["w"]}))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"step 10|leaves"):
            manager.restore(10, args=args)
        assert manager.latest_step() == 10


def test_manager_of_some_processes_has_no_ram(world: World) -> None:
    world.persistent.mkdir(exist_ok=True)
    waiting = plain.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    options = options_of(multiprocessing_options=waiting, create=False)
    with manager_of(world, options=options) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(state_of(world, 0)))
        manager.wait_until_finished()
    assert not any(world.ramdisk.glob("*/process_*"))
