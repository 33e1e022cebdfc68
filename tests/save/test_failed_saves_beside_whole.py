"""Saves that fail cost no whole step: none of those to be kept, nor the last of a former life."""

from __future__ import annotations

import pytest
from world import World

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES


class Unsteady:
    """An iterator whose state is sometimes too large: then a save fails behind its tensors."""

    is_broken = False

    def get_state(self) -> str:
        return "x" * MAX_HOST_STATE_BYTES if self.is_broken else ""

    def set_state(self, state: str) -> None:
        del state


def save(ckpt: EmergencyCheckpointer, world: World, step: int, host: Unsteady, **bad: bool) -> None:
    host.is_broken = bad.get("fails", False)
    ckpt.save(step=step, state=world.state(step), host_state=host)
    ckpt.wait_until_finished()
    host.is_broken = False


def whole(ckpt: EmergencyCheckpointer, world: World) -> tuple[int, ...]:
    return ckpt.steps.survey(world.state(0)).local


def test_failed_saves_cost_no_kept_step(world: World) -> None:
    host = Unsteady()
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
    host = Unsteady()
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
    host = Unsteady()
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
