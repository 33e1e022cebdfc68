"""Two checkpointers of one run in one process, both in use: one RAM tier, and who lacks it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from every_face import opener
from orbax_faces import FACES, state, target
from world import World, same, save_all

from emergency_ckpt.errors import CheckpointError, LocalTierError

ALREADY = "this process has a checkpointer of that run already .*; stop or close it first"
REPLACED = "another checkpointer of its run took its place after a restore that failed"


@pytest.mark.parametrize("kind", FACES)
def test_second_manager_beside_orbax_has_no_ram(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened = opener(kind, world)
    with caplog.at_level(logging.WARNING), opened() as first, opened() as second:
        (event,) = world.named("ram.off", cause="given_up", operation="start")
        assert first.save(0, state(world, 0))
        assert first.save(1, state(world, 1))
        assert second.save(100, state(world, 100))
        for face in (first, second):
            face.wait()
        assert same(first.load(1, target(world)), state(world, 1))
        assert same(second.load(100, target(world)), state(world, 100))
        second.reload()
        assert (first.latest(), second.latest()) == (1, 100)
    assert world.named("ram.off", cause="given_up") == [event]
    (line,) = [line for line in caplog.messages if line.startswith("ram.off.given_up: ")]
    assert "this process has a checkpointer of that run already" in line
    assert "stop or close it first" in line


def test_second_checkpointer_is_refused(world: World) -> None:
    with world.open_both() as first:
        save_all(first, world, 1)
        with pytest.raises(LocalTierError, match=ALREADY):
            world.open_both()
        save_all(first, world, 2)
    with world.open_both() as later:
        world.restores(2, by=later)


def test_second_emergency_manager_takes_the_place_of_the_first(world: World) -> None:
    opened = opener("emergency", world)
    first = opened()
    assert first.save(0, state(world, 0))
    assert first.save(1, state(world, 1))
    second = opened()
    with pytest.raises(CheckpointError, match="the checkpointer was stopped"):
        first.save(2, state(world, 2))
    assert same(second.load(1, target(world)), state(world, 1))
    second.own.close()


def one_whose_restore_failed(opened: Callable[[], Any], world: World) -> Any:
    """Return a face that has saved two steps, and that was asked for one that is not there."""
    face = opened()
    for step in range(2):
        face.save(step, state(world, step))
        face.wait()
    with pytest.raises(Exception, match="7"):  # each face has its own
        face.load(7, target(world))
    return face


@pytest.mark.parametrize("kind", ["native", *FACES])
def test_one_whose_restore_failed_makes_way(world: World, kind: str) -> None:
    """A variable of a notebook refers to the first until the second one is made."""
    opened = opener(kind, world)
    first = one_whose_restore_failed(opened, world)
    second = opened()
    assert same(second.load(1, target(world)), state(world, 1))
    assert not world.named("ram.off", cause="given_up")
    if kind == "native":
        with pytest.raises(CheckpointError, match=REPLACED):
            first.save(2, state(world, 2))
    else:
        assert not first.save(2, state(world, 2))
        (event,) = world.named("ram.off", cause="given_up")
        assert REPLACED in str(event.fields["reason"])
        first.own.close()
    assert second.save(3, state(world, 3))
    second.wait()
    assert same(second.load(3, target(world)), state(world, 3))


@pytest.mark.parametrize("kind", ["native", *FACES])
def test_one_that_goes_on_after_a_failed_restore_keeps_its_place(world: World, kind: str) -> None:
    opened = opener(kind, world)
    first = one_whose_restore_failed(opened, world)
    assert first.save(2, state(world, 2))
    if kind == "native":
        with pytest.raises(LocalTierError, match=ALREADY):
            opened()
    else:
        opened()
        assert world.named("ram.off", cause="given_up", operation="start")
    first.wait()
    assert same(first.load(2, target(world)), state(world, 2))
