"""A save and a restore enter few rooms before their first byte."""

from __future__ import annotations

import pytest
from walk import END_OF_SAVE, FIRST_BYTES, Walk
from world import World

HOST_STATE = {"position": 4}


@pytest.mark.dear
@pytest.mark.parametrize("tier", ["local", "persistent"])
def test_restore_until_the_first_byte_walks_few_rooms(world: World, tier: str) -> None:
    with world.open_both() as saving:
        for step in (1, 2):
            saving.save(step=step, state=world.state(step), host_state=dict(HOST_STATE))
        saving.wait_until_finished()
    if tier == "persistent":
        world.lose_ram()
    with world.open_both() as restoring:
        with Walk(FIRST_BYTES[tier]) as walk:
            step, _ = restoring.restore(state=world.state(0), host_state=dict(HOST_STATE))
        assert restoring.last_restore is not None
        assert (step, restoring.last_restore.tier) == (2, tier)
    assert walk.ended
    assert {"restore", "core", "ram"} <= walk.rooms
    assert len(walk.rooms) <= 8, walk.rooms
    assert len(walk.climbs) <= 4, walk.climbs
    # It plans no snapshot, and asks ``save`` for nothing but to hold still.
    assert not walk.modules & {"state.snapshot", "core.save.snapshot_plan"}


@pytest.mark.parametrize("step", [3, 4], ids=["local", "both"])
def test_save_until_the_snapshot_walks_few_rooms(world: World, step: int) -> None:
    with world.open_both() as checkpointer:
        checkpointer.restore(state=world.state(0), host_state=dict(HOST_STATE))
        checkpointer.save(step=step - 2, state=world.state(1), host_state=dict(HOST_STATE))
        checkpointer.wait_until_finished()
        with Walk(END_OF_SAVE) as walk:
            checkpointer.save(step=step, state=world.state(step), host_state=dict(HOST_STATE))
    assert walk.ended
    assert {"save", "state"} <= walk.rooms
    assert len(walk.rooms) <= 9, walk.rooms
    assert not walk.climbs
