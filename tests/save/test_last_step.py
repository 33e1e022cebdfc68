"""The last step of a loop is named where storage lacks it at the end."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
from world import World, check_restored, logged, save

RARE: dict[str, Any] = {"local_save_every": 100, "save_every": 100}
LAST = 7


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
    assert line.endswith("local tier, the newest that is saved is 4")
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
    assert "end the loop with save(..., force=True)" in line


def test_end_warns_a_loop_that_asks_before_it_saves(world: World) -> None:
    with world.open_both(local_save_every=3, save_every=100) as checkpointer:
        for step in range(1, LAST + 1):
            if checkpointer.should_save(step):
                save(checkpointer, world, step)
    assert unsaved(world) == [(LAST, "the newest step in storage is none, in RAM 6")]


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
