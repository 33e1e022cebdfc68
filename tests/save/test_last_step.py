"""The last step of a loop: saved when the checkpointer stops, or named when it is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import grain.python as grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
from world import World, check_restored, logged, same, save

from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import CheckpointError, HostStateError

RARE: dict[str, Any] = {"local_save_every": 100, "save_every": 100}
LAST = 7


@pytest.mark.parametrize("is_noticed", [False, True])
def test_stop_saves_the_last_step_in_both_tiers(world: World, is_noticed: bool) -> None:
    with world.open_both(save_on_stop=True, **RARE) as checkpointer:
        for step in range(1, LAST + 1):
            assert not save(checkpointer, world, step)
        if is_noticed:
            os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.failed_saves == 0
    assert world.names().count("preemption.reached") == is_noticed
    assert not world.named("preemption.missed", cause="not_written")
    check_restored(world, LAST)


def test_stop_saves_the_step_in_the_tier_that_lacks_it(world: World) -> None:
    with world.open_both(save_on_stop=True, save_every=100) as checkpointer:
        for step in range(1, LAST + 1):
            assert save(checkpointer, world, step)
            checkpointer.wait_until_finished()
    stored = [e.fields["step"] for e in world.events if e.name == "persistent.complete"]
    in_ram = [e.fields["step"] for e in world.events if e.name == "save.complete"]
    assert stored == [LAST]
    assert in_ram == list(range(1, LAST + 1))
    check_restored(world, LAST)


def test_stop_after_forced_save_saves_nothing_more(world: World) -> None:
    with world.open_both(save_on_stop=True, **RARE) as checkpointer:
        assert save(checkpointer, world, LAST, force=True)
    assert world.names().count("save.started") == 2
    assert checkpointer.failed_saves == 0
    check_restored(world, LAST)


def test_stop_saves_the_step_as_it_was_given(world: World) -> None:
    """The caller writes to its own containers and numpy arrays after the call."""
    state, host = {**world.state(LAST), "counts": np.arange(3)}, {"at": LAST}
    with world.open_both(save_on_stop=True, **RARE) as checkpointer:
        checkpointer.save(step=LAST, state=state, host_state=host)
        state["counts"] += 100
        state["w"] = state["w"] * 0
        host["at"] = -1
    with world.open_both() as checkpointer:
        target = {**world.state(0), "counts": np.zeros(3, np.int64)}
        assert checkpointer.restore(state=target, host_state=host)[0] == LAST
        found = checkpointer.restore(state=target, host_state=host)[1]
    assert host == {"at": LAST}
    assert same(found, {**world.state(LAST), "counts": np.arange(3)})


def test_stop_after_donation_names_the_lost_step(world: World) -> None:
    with logged() as lines, world.open_both(save_on_stop=True, **RARE) as checkpointer:
        save(checkpointer, world, 1, force=True)
        state = world.state(LAST)
        checkpointer.save(step=LAST, state=state, host_state={"at": LAST})
        state["w"].delete()  # as a train step that donates it
    assert [e.fields["step"] for e in world.events if e.name == "stop.not_saved"] == [LAST]
    assert any(line.startswith("stop.not_saved: its arrays were donated") for line in lines)
    check_restored(world, 1)


def test_exception_saves_no_last_step(world: World) -> None:
    def train() -> None:
        with world.open_both(save_on_stop=True, **RARE) as checkpointer:
            save(checkpointer, world, LAST)
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        train()
    check_restored(world, None)


def test_restore_forgets_the_step_before_it(world: World) -> None:
    with world.open_both(save_on_stop=True, **RARE) as checkpointer:
        save(checkpointer, world, 1, force=True)
        save(checkpointer, world, LAST)
        checkpointer.restore(1, state=world.state(0), host_state={})
    check_restored(world, 1)


def test_host_state_that_cannot_be_kept_is_refused_at_once(world: World) -> None:
    with world.open_both(save_on_stop=True, **RARE) as checkpointer:
        with pytest.raises(HostStateError):
            checkpointer.save(step=1, state=world.state(1), host_state=object())
        save(checkpointer, world, LAST)
    check_restored(world, LAST)


def test_error_while_saving_the_last_step_lets_go_of_all(world: World) -> None:
    """A state that cannot be saved: said by ``stop``, and the ramdisk is free again."""
    checkpointer = world.open_both(save_on_stop=True, **RARE)
    checkpointer.save(step=LAST, state={"w": "a text"})
    with pytest.raises(CheckpointError):
        checkpointer.stop()
    with world.open_both() as checkpointer:
        save(checkpointer, world, 2)
    check_restored(world, 2)


def test_notice_after_the_last_save_names_what_is_lost(world: World) -> None:
    with logged() as lines, world.open_both(**RARE) as checkpointer:
        save(checkpointer, world, 4, force=True)
        save(checkpointer, world, LAST)
        os.kill(os.getpid(), signal.SIGTERM)
    lost = [e.fields for e in world.named("preemption.missed", cause="not_written")]
    assert [(each["step"], each["tier"]) for each in lost] == [
        (LAST, "local"),
        (LAST, "persistent"),
    ]
    (line, _) = [line for line in lines if line.startswith("preempted: step 7 is not in the ")]
    assert line.endswith("local tier, the newest that is saved is 4; see save_on_stop")
    check_restored(world, 4)


def unsaved(world: World) -> list[tuple[int, str]]:
    """What was told of last steps that storage lacks."""
    told = [e.fields for e in world.events if e.name == "stop.not_saved"]
    return [(each["step"], each["text"].partition(", which is lost")[0]) for each in told]


@pytest.mark.parametrize("stored", [None, 4])
def test_end_warns_of_a_last_step_that_storage_lacks(world: World, stored: int | None) -> None:
    with logged() as lines, world.open_both(local_save_every=1, save_every=100) as checkpointer:
        for step in range(1, LAST + 1):
            save(checkpointer, world, step, force=step == stored)
    text = f"the newest step in storage is {stored or 'none'}, in RAM {LAST}"
    assert unsaved(world) == [(LAST, text)]
    (line,) = [line for line in lines if line.startswith("stop.not_saved: ")]
    assert "end the loop with save(..., force=True), or set save_on_stop" in line


def test_end_knows_steps_that_earlier_lives_stored(world: World) -> None:
    with world.open_both(**RARE) as checkpointer:
        save(checkpointer, world, 4, force=True)
    with world.open_both(local_save_every=1, save_every=100) as checkpointer:
        checkpointer.restore(state=world.state(0), host_state={})
        save(checkpointer, world, 5)
    assert unsaved(world) == [(5, "the newest step in storage is 4, in RAM 5")]


@pytest.mark.parametrize("how", ["stored", "no save", "error", "notice", "RAM alone", "left"])
def test_end_that_lost_nothing_warns_of_nothing(world: World, how: str) -> None:
    settings: dict[str, Any] = {"local_save_every": 1, "save_every": 100}
    settings |= {"save_every": 0} if how == "RAM alone" else {}
    with contextlib.suppress(KeyError, SystemExit), world.open_both(**settings) as checkpointer:
        if how != "no save":
            save(checkpointer, world, LAST, force=how == "stored")
        if how == "error":
            raise KeyError("a bug")
        if how == "left":
            checkpointer.restore(state=world.state(0), host_state={})
        if how == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
            save(checkpointer, world, LAST + 1)
            raise SystemExit(143)
    assert unsaved(world) == []


@pytest.mark.parametrize("end", ["close", "with"])
def test_orbax_manager_saves_the_last_step_at_its_end(world: World, end: str) -> None:
    world.ramdisk.mkdir()
    data = iter(grain.MapDataset.range(100).to_iter_dataset())

    def opened() -> emergency.CheckpointManager:
        options = emergency.CheckpointManagerOptions(settings={"save_on_stop": True})
        places = world.ramdisk, world.persistent
        return emergency.CheckpointManager(*places, world.mesh, world.state(0), options=options)

    manager = opened()
    with manager if end == "with" else contextlib.nullcontext():
        for step in range(1, LAST + 1):
            next(data)
            state = ocp.args.PyTreeSave(world.state(step))
            kept = grain.PyGrainCheckpointSave(data)
            manager.save(step, args=ocp.args.Composite(state=state, dataset=kept))
        next(data)  # one more than the last step had
    manager.close()
    world.lose_ram()
    world.ramdisk.mkdir()
    again = opened()
    assert again.latest_step() == LAST
    wanted = ocp.args.Composite(dataset=grain.PyGrainCheckpointRestore(data))
    assert same(again.restore(LAST, args=wanted).state, world.state(LAST))
    assert next(data) == LAST
    again.close()
