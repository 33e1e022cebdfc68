"""A job that starts after a drain has found it over, and before the drain has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drains import Drains, Position
from looks import eckpt_here

from emergency_ckpt.storage import DirectoryWriter, PersistentTier
from emergency_ckpt.storage.step_writer import StepWriter

POINTS: dict[str, tuple[object, str]] = {
    "claim": (DirectoryWriter, "begin"),
    "room": (DirectoryWriter, "make_room"),
    "arrays": (StepWriter, "write"),
    "marker": (PersistentTier, "finish"),
    "version": (DirectoryWriter, "publish"),
}


def once_before(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[[], None]
) -> None:
    """Do ``work`` before the first call of a method; it may call the method itself."""
    call, works = getattr(owner, name), [work]

    def work_and_call(*args: Any, **kwargs: Any) -> Any:
        while works:
            works.pop()()
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, work_and_call)


@pytest.mark.parametrize("point", POINTS)
def test_drain_beside_a_job_that_starts_spoils_no_step(
    drains: Drains, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The job goes on from RAM, over the slots that the drain reads, and saves to storage."""
    world, position = drains.world, Position()
    drains.save(5)

    def live() -> None:
        with world.open_both(save_every=4) as ckpt:
            assert ckpt.restore(state=world.state(-1), host_state=position)[0] == 5
            for step in (6, 7, 8):
                position.at = 10 * step
                ckpt.save(step=step, state=world.state(step), host_state=position)
                ckpt.wait_until_finished()
            ckpt.check_for_errors()

    once_before(monkeypatch, *POINTS[point], live)
    eckpt_here(*drains.words())  # it may end with an error
    assert drains.restored() == (8, 80)
    assert drains.restored_from_storage() == (8, 80)
