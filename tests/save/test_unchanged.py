"""A save whose bytes all equal those of the save before is told, once: the weights do not move."""

from __future__ import annotations

from typing import Any

import pytest
from world import World, finish

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.save import Ballot
from emergency_ckpt.save.value_checks import UnchangedSaves


def save(ckpt: EmergencyCheckpointer, world: World, step: int, of: int, **settings: Any) -> None:
    """Save at ``step`` the state of step ``of``."""
    assert ckpt.save(step=step, state=world.state(of), host_state={"at": step}, **settings)
    finish(ckpt)


def told(world: World) -> list[tuple[object, object]]:
    events = [event.fields for event in world.events if event.name == "save.unchanged"]
    return [(each["step"], each["before"]) for each in events]


def test_save_with_the_bytes_of_the_save_before_is_told_once(world: World) -> None:
    with world.open(local_save_every=1) as ckpt:
        save(ckpt, world, 1, of=1)
        save(ckpt, world, 2, of=2)
        assert told(world) == []
        save(ckpt, world, 3, of=2)
        assert told(world) == [(3, 2)]
        save(ckpt, world, 4, of=2)
        assert told(world) == [(3, 2)]
        save(ckpt, world, 5, of=5)
        save(ckpt, world, 6, of=5)
    assert told(world) == [(3, 2), (6, 5)]


def test_forced_save_of_the_same_step_is_not_told(world: World) -> None:
    with world.open_both() as ckpt:
        save(ckpt, world, 1, of=1)
        ckpt.save(step=1, state=world.state(1), host_state={"at": 1}, force=True)
        finish(ckpt)
        assert told(world) == []
        save(ckpt, world, 2, of=1)
    assert told(world) == [(2, 1)]


def test_first_save_after_a_restore_is_compared_with_none(world: World) -> None:
    with world.open(local_save_every=1) as ckpt:
        save(ckpt, world, 1, of=1)
        assert ckpt.restore(state=world.state(0), host_state={"at": 0})[0] == 1
        save(ckpt, world, 2, of=1)
    assert told(world) == []


@pytest.mark.parametrize(
    ("since", "expected"),
    [([4, 4], 4), ([4, -1], -1), ([4, 2], -1), ([-1, -1], -1), ([], -1)],
    ids=["all", "one changed", "of another step", "all changed", "nobody"],
)
def test_all_processes_must_be_unchanged_since_the_same_step(
    since: list[int], expected: int
) -> None:
    ballots = {process: Ballot(b"d", unchanged_since=step) for process, step in enumerate(since)}
    assert UnchangedSaves.since(ballots) == expected
