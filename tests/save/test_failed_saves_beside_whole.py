"""Saves that fail cost no whole step: none of those to be kept, nor the last of a former life."""

from __future__ import annotations

import contextlib

import pytest
from faults import host_states_are_too_large
from world import World

from emergency_ckpt import EmergencyCheckpointer


class Reader:
    """An iterator that is always at its start."""

    def get_state(self) -> str:
        return ""

    def set_state(self, state: str) -> None:
        del state


def save(ckpt: EmergencyCheckpointer, world: World, step: int, host: Reader, **bad: bool) -> None:
    fails = bad.get("fails", False)
    with host_states_are_too_large() if fails else contextlib.nullcontext():
        ckpt.save(step=step, state=world.state(step), host_state=host)
        ckpt.wait_until_finished()


def whole(ckpt: EmergencyCheckpointer, world: World) -> tuple[int, ...]:
    return ckpt.steps.survey(world.state(0)).local


def test_failed_saves_cost_no_kept_step(world: World) -> None:
    host = Reader()
    with world.open(local_keep_last_n=2) as ckpt:
        ckpt.restore(state=world.state(0), host_state=host)
        for step in (1, 2):
            save(ckpt, world, step, host)
        for step in (3, 4, 5):
            save(ckpt, world, step, host, fails=True)
            assert whole(ckpt, world) == (1, 2)
        save(ckpt, world, 6, host)
        assert whole(ckpt, world)[-2:] == (2, 6)


@pytest.mark.parametrize("begins_by", ["saving", "survey"])
def test_failed_saves_of_a_life_without_restore(world: World, begins_by: str) -> None:
    """The newest whole step of the life before stays until one of this life is whole."""
    host = Reader()
    with world.open() as ckpt:
        for step in (9, 10):
            save(ckpt, world, step, host)
    for steps in ((11, 12, 13), (14, 15, 16)):  # the second life finds incomplete ones of the first
        with world.open() as ckpt:
            if begins_by == "survey":
                ckpt.go_on_after(ckpt.steps.survey(world.state(0)))
            for step in steps:
                save(ckpt, world, step, host, fails=True)
                assert whole(ckpt, world) == (10,)
    with world.open() as ckpt:
        assert ckpt.restore(state=world.state(0), host_state=host)[0] == 10


def test_restore_of_an_older_step_costs_no_kept_step(world: World) -> None:
    host = Reader()
    with world.open(local_keep_last_n=2) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, world, step, host)
    with world.open(local_keep_last_n=2) as ckpt:
        _, held = ckpt.restore(state=world.state(0), host_state=host)
        ckpt.restore(2, state=held, host_state=host)
        for step in (4, 5):
            save(ckpt, world, step, host)
        save(ckpt, world, 6, host, fails=True)
        assert whole(ckpt, world) == (4, 5)
        del held
