"""``emergency_ckpt.orbax.v1``: Orbax v1's ``Checkpointer`` with a RAM tier beside its storage."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as plain
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax_faces import Positioned, state
from orbax_faces import target as abstract
from readme_blocks import readme_block
from world import LONG_S, World, same

import emergency_ckpt.orbax.v1 as ocp
from emergency_ckpt.errors import DeadlineExceeded, SlotBusy, StateMismatch
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.save import Vote
from emergency_ckpt.save.local_save import SaveResult
from emergency_ckpt.types import SaveId

USES_PRIVATE_PARTS = {
    "test_cleanup_tmp_directories_false",
    "test_cleanup_tmp_directories_true",
    "test_gcs_deletion_options",
    "test_lightweight_initialize_false",
    "test_lightweight_initialize_true",
    "test_save_async_raises_on_background_failure",
}
"""Tests of Orbax's that look into ``_manager`` of its class."""


class Iterator10(Positioned):
    """A data iterator: Orbax v1 asks for ``save`` and ``load``, the RAM tier for its state."""

    def __init__(self) -> None:
        self.at = 0

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def opened(world: World, *, every: int = 1, stores: int = 100, **more: Any) -> Any:
    """A checkpointer with a RAM tier; storage has step 0 and each multiple of ``stores``."""
    return ocp.training.Checkpointer(
        world.persistent,
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(stores),
        local_directory=world.ramdisk,
        settings={"local_save_every": every, "mesh": world.mesh, "on_event": world.events.append},
        **more,
    )


@pytest.fixture
def two_tiers(world: World) -> World:
    """Storage has step 0, RAM has step 3."""
    with opened(world) as checkpointer:
        for step in range(4):
            assert checkpointer.save(step, state(world, step), metrics={"loss": float(step)})
    return world


@pytest.mark.parametrize(
    "name",
    [name for name in dir(plain.training.Checkpointer) if not name.startswith("_")] + ["__init__"],
)
def test_v1_checkpointer_has_orbaxs_methods_and_arguments(world: World, name: str) -> None:
    theirs, mine = (getattr(m.training.Checkpointer, name, None) for m in (plain, ocp))
    if isinstance(theirs, property):
        assert isinstance(mine, property)
        return
    if mine is None:
        with opened(world) as checkpointer:
            assert getattr(checkpointer, name).__func__ is theirs
        return
    known = inspect.signature(mine).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    wanted = inspect.signature(theirs).parameters
    assert takes_all or list(known)[: len(wanted)] == list(wanted)


def test_every_other_name_of_v1_is_orbaxs_own() -> None:
    for theirs, mine, ours in (
        (plain, ocp, {"training"}),
        (plain.training, ocp.training, {"Checkpointer"}),
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")} - ours
        assert [n for n in names if getattr(mine, n, None) is not getattr(theirs, n)] == []


def test_newest_step_comes_from_ram(two_tiers: World) -> None:
    with opened(two_tiers) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [0, 3]
        assert checkpointer.latest.step == 3
        assert same(checkpointer.load(None, abstract(two_tiers)), state(two_tiers, 3))
        assert checkpointer.save(4, state(two_tiers, 4))
    with opened(two_tiers) as checkpointer:
        assert same(
            checkpointer.load(checkpointer.latest, abstract(two_tiers)), state(two_tiers, 4)
        )


def test_step_of_storage_is_plain_orbaxs(two_tiers: World) -> None:
    with plain.training.Checkpointer(two_tiers.persistent) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [0]
        assert same(checkpointer.load(0, abstract(two_tiers)), state(two_tiers, 0))
        checkpointer.save(7, state(two_tiers, 7))
    with opened(two_tiers) as checkpointer:
        assert checkpointer.latest.step == 7
        assert same(checkpointer.load(None, abstract(two_tiers)), state(two_tiers, 7))


def test_lost_ram_leaves_the_step_of_storage(two_tiers: World) -> None:
    two_tiers.lose_ram()
    with opened(two_tiers) as checkpointer:
        assert checkpointer.latest.step == 0
        assert same(checkpointer.load(None, abstract(two_tiers)), state(two_tiers, 0))


def test_older_step_by_number_goes_on_from_there(two_tiers: World) -> None:
    with opened(two_tiers) as checkpointer:
        assert same(checkpointer.load(0, abstract(two_tiers)), state(two_tiers, 0))
        assert checkpointer.save(1, state(two_tiers, 101))
    with opened(two_tiers) as checkpointer:
        assert same(checkpointer.load(None, abstract(two_tiers)), state(two_tiers, 101))


def test_several_checkpointables_and_an_iterator_come_from_ram(world: World) -> None:
    iterator = Iterator10()
    with opened(world) as checkpointer:
        for step in (0, 1):
            iterator.at = 10 + step
            parts = {"model": state(world, step), "opt": state(world, 50), "data": iterator}
            assert checkpointer.save_checkpointables(step, parts)
    found, target = Iterator10(), abstract(world)
    with opened(world) as checkpointer:
        loaded = checkpointer.load_checkpointables(
            None, {"model": target, "opt": target, "data": found}
        )
    assert same(loaded["model"], state(world, 1))
    assert same(loaded["opt"], state(world, 50))
    assert loaded["data"] is found
    assert found.at == 11


def test_part_of_a_step_is_loaded_where_storage_has_it(world: World) -> None:
    with opened(world, stores=1) as checkpointer:
        checkpointer.save_checkpointables(0, {"model": state(world, 0), "opt": state(world, 9)})
    with opened(world) as checkpointer:
        loaded = checkpointer.load_checkpointables(0, {"opt": abstract(world)})
        assert list(loaded) == ["opt"]
        assert same(loaded["opt"], state(world, 9))


def test_part_of_a_step_in_ram_alone_is_named(two_tiers: World) -> None:
    with opened(two_tiers) as checkpointer:
        with pytest.raises(StateMismatch):
            checkpointer.load(3, {"w": abstract(two_tiers)["w"]})
        with pytest.raises(ValueError, match="step 3 is in RAM alone"):
            checkpointer.load(3)
        assert same(checkpointer.load(0), state(two_tiers, 0))


def test_name_that_was_not_saved_is_not_another_one(world: World) -> None:
    """As with Orbax alone, where the step has one checkpointable of another name."""
    with opened(world) as checkpointer:
        for step in (0, 1):
            assert checkpointer.save(step, state(world, step), checkpointable_name="ema")
        for step, error in ((0, KeyError), (1, ValueError)):
            with pytest.raises(error, match="params"):
                checkpointer.load(step, abstract(world), checkpointable_name="params")
            loaded = checkpointer.load(step, abstract(world), checkpointable_name="ema")
            assert same(loaded, state(world, step))


def test_checkpointable_that_ram_cannot_keep_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Stateful(Iterator10):
        get_state = set_state = None  # pyright: ignore[reportAssignmentType]

    with opened(world, stores=2) as checkpointer, caplog.at_level(logging.WARNING):
        saved = [
            checkpointer.save_checkpointables(
                step, {"model": state(world, step), "odd": Stateful()}
            )
            for step in range(4)
        ]
    assert saved == [True, False, True, False]
    assert sum("saved to storage alone" in line for line in caplog.messages) == 1
    assert "'odd'" in caplog.text


def test_metrics_that_ram_cannot_keep_leave_out_the_step(world: World) -> None:
    with opened(world) as checkpointer:
        for step, metrics in enumerate([{"loss": 1.0}, {"loss": object()}, {"loss": 2.0}]):
            is_saved = checkpointer.save(step, state(world, step), metrics=metrics)
            assert is_saved is (step != 1)
        assert checkpointer.latest.step == 2
    (skipped,) = world.named("save.skipped", cause="unfit")
    assert "not JSON values" in str(skipped.fields["reason"])


def test_metadata_of_a_step_in_ram_alone(two_tiers: World) -> None:
    with opened(two_tiers) as checkpointer:
        found = checkpointer.metadata(3)
        assert (found.step, found.metrics) == (3, {"loss": 3.0})
        assert found.metadata["w"].shape == state(two_tiers, 0)["w"].shape
        assert found.time <= checkpointer.latest.time
        named = checkpointer.checkpointables_metadata()
        assert list(named.metadata) == ["state"]
        assert checkpointer.metadata(0).metrics == {"loss": 0.0}


@pytest.mark.parametrize("stores", [1, 100], ids=["both", "ram"])
def test_overwritten_step_is_that_of_the_last_save(world: World, stores: int) -> None:
    with opened(world, stores=stores) as checkpointer:
        for step in range(2):
            assert checkpointer.save(step, state(world, step))
        assert checkpointer.save(1, state(world, 101), overwrite=True)
        assert checkpointer.latest.step == 1
        assert same(checkpointer.load(None, abstract(world)), state(world, 101))
    with opened(world, stores=stores) as checkpointer:
        assert same(checkpointer.load(1, abstract(world)), state(world, 101))


REFUSED_SAVES: dict[str, Any] = {
    "leaf": lambda checkpointer, step: checkpointer.save(step, {"w": object()}, overwrite=True),
    "leaf, async": lambda checkpointer, step: checkpointer.save_async(
        step, {"w": object()}, overwrite=True
    ),
    "name": lambda checkpointer, step: checkpointer.save_checkpointables(
        step, {"metrics": {"w": 1}}, overwrite=True
    ),
    "nothing": lambda checkpointer, step: checkpointer.save_checkpointables(
        step, {}, overwrite=True
    ),
    "no dict": lambda checkpointer, step: checkpointer.save_checkpointables(
        step, [("state", {"w": 1})], overwrite=True
    ),
}


@pytest.mark.parametrize("stores", [1, 100], ids=["both", "ram"])
@pytest.mark.parametrize("save", REFUSED_SAVES.values(), ids=REFUSED_SAVES)
def test_overwriting_save_that_orbax_refuses_leaves_the_step(
    world: World, save: Any, stores: int
) -> None:
    with opened(world, stores=stores) as checkpointer:
        for step in range(2):
            assert checkpointer.save(step, state(world, step))
        with pytest.raises(ValueError, match=r"Unsupported leaf|reserved|must be a valid dict"):
            save(checkpointer, 1)
        checkpointer.reload()
        assert checkpointer.latest.step == 1
        assert same(checkpointer.load(1, abstract(world)), state(world, 1))
    with opened(world, stores=stores) as checkpointer:
        assert same(checkpointer.load(1, abstract(world)), state(world, 1))


@pytest.mark.parametrize(
    "remove",
    [
        lambda checkpointer: checkpointer.delete(3, missing_ok="x"),
        lambda checkpointer: checkpointer.delete_async(3, missing_ok=0),
        lambda checkpointer: checkpointer.cancel(np.int64(3)),
    ],
    ids=["delete", "delete_async", "cancel"],
)
def test_removal_that_orbax_refuses_leaves_the_step_in_ram(two_tiers: World, remove: Any) -> None:
    with opened(two_tiers) as checkpointer:
        with pytest.raises((TypeError, AttributeError)):  # Orbax's own
            remove(checkpointer)
        checkpointer.reload()
        assert checkpointer.latest.step == 3
        assert same(checkpointer.load(3, abstract(two_tiers)), state(two_tiers, 3))


def test_load_that_orbax_refuses_leaves_ram_the_newest(two_tiers: World) -> None:
    with opened(two_tiers) as checkpointer:
        with pytest.raises(TypeError, match="Unsupported abstract leaf"):
            checkpointer.load(None, {"w": object()})
        assert checkpointer.latest.step == 3


@pytest.mark.parametrize("step", [0, 3], ids=["storage", "ram"])
def test_async_deletion_says_whether_storage_had_it(two_tiers: World, step: int) -> None:
    with opened(two_tiers) as checkpointer:
        assert checkpointer.delete_async(step).result() is (step == 0)
        assert step not in [each.step for each in checkpointer.checkpoints]


@pytest.mark.parametrize("step", [0, 3], ids=["storage", "ram"])
def test_deleted_step_is_gone_from_its_tier(two_tiers: World, step: int) -> None:
    with opened(two_tiers) as checkpointer:
        assert checkpointer.delete(step)
        assert step not in [each.step for each in checkpointer.checkpoints]
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            checkpointer.delete(step)
        assert not checkpointer.delete(step, missing_ok=True)


@pytest.mark.parametrize("stores", [1, 100], ids=["both", "ram"])
def test_cancelled_step_does_not_come_back_from_ram(world: World, stores: int) -> None:
    with opened(world, stores=stores) as checkpointer:
        for step in range(2):
            assert checkpointer.save(step, state(world, step))
        checkpointer.cancel(1)
        assert checkpointer.latest.step == 0
        assert same(checkpointer.load(None, abstract(world)), state(world, 0))
    with opened(world, stores=stores) as checkpointer:
        assert [each.step for each in checkpointer.checkpoints] == [0]
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            checkpointer.load(1, abstract(world))


def test_settings_with_a_directory_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="without 'dir'"):
        ocp.training.Checkpointer(world.persistent, settings={"dir": "/somewhere"})


def test_response_of_a_save_to_ram_calls_back(world: World) -> None:
    heard: list[bool] = []
    with opened(world) as checkpointer:
        checkpointer.save(0, state(world, 0))
        response = checkpointer.save_async(1, state(world, 1))
        assert response.result()
        response.on_complete(heard.append)
        checkpointer.wait()
    assert opened_step(world) == 1


def test_response_of_a_save_to_ram_tells_the_truth_after_the_end(world: World) -> None:
    with opened(world) as checkpointer:
        checkpointer.save(0, state(world, 0))
        response = checkpointer.save_async(1, state(world, 1))
    assert response.result()
    assert opened_step(world) == 1


def test_response_of_a_save_to_ram_is_true_after_later_saves(world: World) -> None:
    """RAM keeps the newest step alone."""
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    responses: list[Any] = []
    with opened(world) as checkpointer:
        checkpointer.save(0, state(world, 0))
        for step in range(1, 4):
            responses.append(checkpointer.save_async(step, state(world, step)))
            checkpointer.wait()
        assert checkpointer.delete(3)
        assert [response.result() for response in responses] == [True] * 3
        responses[0].on_complete(heard.put)
        assert heard.get(timeout=LONG_S)
    assert [response.result() for response in responses] == [True] * 3


def test_response_of_a_save_to_ram_does_not_wait_for_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast, votes = Vote.cast, threading.Event()

    def late(vote: Vote, save: SaveId, *args: Any, **more: Any) -> Any:
        assert save.step < 2 or votes.wait(LONG_S)
        return cast(vote, save, *args, **more)

    monkeypatch.setattr(Vote, "cast", late)
    with opened(world) as checkpointer:
        checkpointer.save(0, state(world, 0))
        first = checkpointer.save_async(1, state(world, 1))
        checkpointer.wait()
        second = checkpointer.save_async(2, state(world, 2))
        try:
            assert first.result(0.0)
            with pytest.raises(DeadlineExceeded):
                second.result(0.0)
        finally:
            votes.set()
        assert second.result()


def test_response_of_a_save_to_ram_that_fails_is_false(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SlotBusy("begin write of", "step 2", "both slots are read")

    with opened(world) as checkpointer:
        checkpointer.save(0, state(world, 0))
        first = checkpointer.save_async(1, state(world, 1))
        assert first.result()
        monkeypatch.setattr(LocalTier, "begin_write", refuse)
        second = checkpointer.save_async(2, state(world, 2))
        assert not second.result()
    assert first.result()
    assert not second.result()


def test_result_of_a_save_that_nobody_asks_for_is_dropped(world: World) -> None:
    with opened(world) as checkpointer:
        for step in range(8):
            checkpointer.save_async(step, state(world, step))
        checkpointer.wait()
        gc.collect()
        assert sum(isinstance(each, SaveResult) for each in gc.get_objects()) <= 1


def opened_step(world: World) -> int:
    with opened(world) as checkpointer:
        return checkpointer.latest.step


def test_deprecated_names_say_what_to_use(world: World) -> None:
    with opened(world) as checkpointer:
        with pytest.warns(DeprecationWarning, match="Use `save` instead"):
            checkpointer.save_pytree(0, state(world, 0))
        with pytest.warns(DeprecationWarning, match="Use `load` instead"):
            assert same(checkpointer.load_pytree(0, abstract(world)), state(world, 0))


def test_state_on_another_mesh_comes_from_ram(two_tiers: World) -> None:
    """The arrays of the next life lie otherwise on the devices."""
    target = abstract(two_tiers)
    w = target["w"]
    target["w"] = jax.ShapeDtypeStruct(
        w.shape, w.dtype, sharding=NamedSharding(two_tiers.mesh, P("slice", "fsdp"))
    )
    with opened(two_tiers) as checkpointer:
        loaded = checkpointer.load(3, target)
    assert loaded["w"].sharding == target["w"].sharding
    assert (jax.device_get(loaded["w"]) == jax.device_get(state(two_tiers, 3)["w"])).all()


LOOP = """
with ocp.training.Checkpointer(directory) as checkpointer:
    first = 0 if checkpointer.latest is None else checkpointer.latest.step + 1
    if first:
        assert same(checkpointer.load(first - 1, like), state_of(first - 1))
    checkpointer.save(first, state_of(first))
"""


def test_loop_goes_on_by_the_imports_of_the_page(world: World) -> None:
    """With Orbax's, with ours, and with Orbax's again: each from the step of the one before."""
    theirs, ours = (line[1:] for line in readme_block("v1", "diff").splitlines())
    names = {
        "directory": world.persistent,
        "same": same,
        "like": abstract(world),
        "state_of": lambda step: state(world, step),
    }
    for first, line in enumerate((theirs, ours, theirs)):
        exec(f"{line}\n{LOOP}", names)
        assert names["first"] == first
        assert names["ocp"] is (ocp if line == ours else plain)


def test_every_way_to_save_load_or_delete_is_of_this_class() -> None:
    """What it passed on to Orbax's would know storage alone."""
    names = {name for name in dir(plain.training.Checkpointer) if not name.startswith("_")}
    moves = {name for name in names if name.startswith(("save", "load", "delete", "cancel"))}
    assert len(moves) >= 14
    assert moves <= set(vars(ocp.training.Checkpointer))


EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
UPSTREAM = """
import orbax.checkpoint.experimental.v1 as ocp
import emergency_ckpt.orbax.v1 as ours
ocp.training.Checkpointer = ours.training.Checkpointer
from absl.testing import absltest
from orbax.checkpoint.experimental.v1._src.training.checkpointer_test_base import (
    CheckpointerTestBase,
)
class Test(CheckpointerTestBase.Test): pass
class DeprecationsTest(CheckpointerTestBase.DeprecationsTest): pass
absltest.main()
"""


@pytest.mark.slow
def test_orbaxs_own_tests_pass_but_for_private_parts(tmp_path: Path) -> None:
    """Its suite is part of its package, and runs on our class in place of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", UPSTREAM, f"--test_tmpdir={tmp_path}"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": EIGHT_DEVICES},
    )  # fmt: skip
    failed = {
        line.split()[1]
        for line in ran.stderr.splitlines()
        if line.startswith(("ERROR: test", "FAIL: test"))
    }
    assert "Ran 56 tests" in ran.stderr
    assert failed == USES_PRIVATE_PARTS
