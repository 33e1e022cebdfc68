"""A good end brings the newest step of RAM to storage, from its slots, or says why it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from damage import flip
from faults import storage_fails
from orbax.checkpoint import checkpoint_managers as ocm
from world import World, check_restored, logged, save

from emergency_ckpt import EmergencyCheckpointer

LAST = 7
OFTEN: dict[str, Any] = {"local_save_every": 1, "save_every": 100, "stores_newest": True}
NEVER: dict[str, Any] = {**OFTEN, "local_save_every": 100}


def train(checkpointer: EmergencyCheckpointer, world: World, last: int = LAST) -> None:
    for step in range(1, last + 1):
        save(checkpointer, world, step)
        checkpointer.wait_until_finished()


def stored(world: World) -> list[int]:
    return [e.fields["step"] for e in world.events if e.name == "persistent.complete"]


def unsaved(world: World) -> list[str]:
    return [e.fields["text"] for e in world.events if e.name == "stop.not_saved"]


@contextlib.contextmanager
def kept_back(world: World, stored_step: int | None, reason: str) -> Iterator[None]:
    """Expect a good end that warns, names both steps and ``reason``, and writes nothing."""
    with logged() as lines:
        yield
    (text,) = unsaved(world)
    newest = "none" if stored_step is None else stored_step
    begin = f"the newest step in storage is {newest}, in RAM {LAST}, which is lost with its hosts ("
    assert text.startswith(begin)
    assert reason in text
    assert any(line.startswith(f"stop.not_saved: {text}") for line in lines)
    assert LAST not in stored(world)
    world.lose_ram()
    world.restores(stored_step, host=stored_step is not None)


@pytest.mark.parametrize("end", ["with", "stop"])
def test_newest_step_is_in_storage_after_a_good_end(world: World, end: str) -> None:
    checkpointer = world.open_both(**OFTEN)
    with checkpointer if end == "with" else contextlib.nullcontext():
        train(checkpointer, world)
        assert stored(world) == []
    checkpointer.stop()
    assert stored(world) == [LAST]
    assert unsaved(world) == []
    check_restored(world, LAST)


def test_arrays_of_the_user_are_not_asked_for_again(world: World) -> None:
    state = world.state(LAST)
    with world.open_both(**OFTEN) as checkpointer:
        checkpointer.save(step=LAST, state=state, host_state={"at": LAST})
        checkpointer.wait_until_finished()
        state["w"].delete()
    check_restored(world, LAST)


def test_step_that_is_still_on_its_way_to_ram_goes_on_to_storage(world: World) -> None:
    with world.open_both(**OFTEN) as checkpointer:
        save(checkpointer, world, LAST)
    check_restored(world, LAST)


def test_steps_after_the_newest_in_ram_are_named(world: World) -> None:
    with world.open_both(**{**OFTEN, "local_save_every": 5}) as checkpointer:
        train(checkpointer, world)
    (text,) = unsaved(world)
    assert text.startswith("the newest step in storage is 5, in RAM 5: end the loop with save(")
    check_restored(world, 5)


def test_metrics_go_along(world: World) -> None:
    with world.open_both(**OFTEN) as checkpointer:
        save(checkpointer, world, LAST, metrics={"loss": 0.5})
    metrics = world.persistent / str(LAST) / "metrics" / "metrics"
    assert json.loads(metrics.read_text()) == {"loss": 0.5}


def test_restored_step_that_storage_lacks_goes_there_too(world: World) -> None:
    """The life before ended without it; this one came to no save in RAM of its own."""
    with world.open_both(local_save_every=1, save_every=100) as checkpointer:
        train(checkpointer, world)
    with world.open_both(**NEVER) as checkpointer:
        world.restores(LAST, host=True, by=checkpointer)
        save(checkpointer, world, LAST + 1)
    assert stored(world) == [LAST]
    check_restored(world, LAST)


def test_failed_save_of_the_step_is_made_good(world: World) -> None:
    with world.open_both(**{**OFTEN, "save_every": 7}) as checkpointer:
        patch = pytest.MonkeyPatch()
        storage_fails(patch, "finish")
        train(checkpointer, world)
        patch.undo()
    assert checkpointer.failed_saves == 1
    assert stored(world) == [LAST]
    check_restored(world, LAST)


def changed_by(value: float) -> Callable[[int], dict[str, Any]]:
    return lambda step: {"changed": np.float32(step + value)}


def test_step_that_was_rolled_back_is_not_written(world: World) -> None:
    """Of two saves of one step that RAM has had, storage gets the one that counts."""
    world.more = changed_by(0.0)
    with world.open_both(local_save_every=1, save_every=100) as checkpointer:
        train(checkpointer, world)
    with world.open_both(**OFTEN) as checkpointer:
        world.restores(LAST - 1, asked=LAST - 1, host=True, by=checkpointer)
        world.more = changed_by(0.5)
        save(checkpointer, world, LAST)
    assert stored(world) == [LAST]
    check_restored(world, LAST)


def test_run_that_saved_nothing_rolls_nothing_back(world: World) -> None:
    with world.open_both(local_save_every=1, save_every=100) as checkpointer:
        train(checkpointer, world)
    with world.open_both(**NEVER) as checkpointer:
        world.restores(LAST - 1, asked=LAST - 1, host=True, by=checkpointer)
        save(checkpointer, world, LAST + 1)
    assert stored(world) == []
    assert "an older step was restored by its number" in unsaved(world)[-1]
    world.restores(LAST, host=True)


def test_rolled_back_step_in_storage_keeps_no_older_one_away(world: World) -> None:
    with world.open_both(**OFTEN) as checkpointer:
        save(checkpointer, world, 1, force=True)
        train(checkpointer, world)
    with world.open_both(**OFTEN) as checkpointer:
        world.restores(1, asked=1, host=True, by=checkpointer)
        save(checkpointer, world, 2)
    assert stored(world) == [1, LAST, 2]
    check_restored(world, 2)


@pytest.mark.parametrize("how", ["forced", "RAM alone", "read", "error", "preempted", "looked"])
def test_nothing_is_written_that_nobody_needs(world: World, how: str) -> None:
    settings = {**OFTEN, "save_every": 0} if how == "RAM alone" else OFTEN
    if how in ("read", "looked"):
        with world.open_both(local_save_every=1, save_every=100) as checkpointer:
            train(checkpointer, world)
        world.events.clear()
    with contextlib.suppress(KeyError, SystemExit), world.open_both(**settings) as checkpointer:
        if how == "read":
            world.restores(LAST, host=True, by=checkpointer)
        elif how != "looked":
            save(checkpointer, world, LAST, force=how == "forced")
        if how == "error":
            raise KeyError("a bug")
        if how == "preempted":
            raise SystemExit(143)
    assert stored(world) == [LAST] * (how == "forced")
    assert unsaved(world) == []


class Never(ocm.SaveDecisionPolicy):
    """A policy of a user who wants no step in storage."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del step, previous_steps, context
        return False


@pytest.mark.parametrize("policy", [Never(), ocm.SpecificStepsPolicy([1000])])
def test_policy_that_chooses_the_steps_is_heeded(world: World, policy: Any) -> None:
    with (
        kept_back(world, None, "policies choose the steps that storage gets"),
        world.open_both(**{**OFTEN, "save_every": policy}) as checkpointer,
    ):
        train(checkpointer, world)


def test_storage_that_fails_is_a_warning_of_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        kept_back(world, 2, "storage failed"),
        world.open_both(**OFTEN) as checkpointer,
    ):
        save(checkpointer, world, 2, force=True)
        checkpointer.wait_until_finished()
        train(checkpointer, world)
        storage_fails(monkeypatch, "finish")
    assert checkpointer.failed_saves == 0
    checkpointer.check_for_errors()


def test_slot_that_was_changed_is_not_written(world: World) -> None:
    with (
        kept_back(world, None, "was changed since its capture"),
        world.open_both(**OFTEN) as checkpointer,
    ):
        train(checkpointer, world)
        for slot in world.ramdisk.glob("run/process_*/slot_*.bin"):
            flip(slot, 0)


def test_host_state_that_is_gone_keeps_the_step_back(world: World) -> None:
    with (
        kept_back(world, None, "host state of step 7: process 0 does not have its own in RAM"),
        world.open_both(**OFTEN) as checkpointer,
    ):
        train(checkpointer, world)
        for document in world.ramdisk.glob("run/process_*/host_state/*/process_*.json"):
            document.unlink()
