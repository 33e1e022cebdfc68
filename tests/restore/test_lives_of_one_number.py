"""Two lives with one number, neither of which knew of the other: one decision, asked twice."""

from __future__ import annotations

import pytest
from persistent_steps import complete_steps
from world import World, save_all

from emergency_ckpt.core.timeline import number_of


def life_of(world: World, step: int) -> str:
    """The incarnation that completed ``step`` last."""
    names = ("save.complete", "persistent.complete")
    found = [e for e in world.events if e.name in names and e.fields.get("step") == step]
    return found[-1].origin.incarnation


@pytest.mark.dear
def test_step_of_storage_stays_chosen_after_it_was_loaded(world: World) -> None:
    """A host was away for one life, and a second one began without it."""
    with world.open_both(save_every=1, local_save_every=1) as ckpt:
        save_all(ckpt, world, 4)
    with world.open() as ckpt:  # storage is away
        assert ckpt.restore(state=world.state(0))[0] == 4
        save_all(ckpt, world, 6, 8)
    elsewhere = world.ramdisk.rename(f"{world.ramdisk}.elsewhere")
    with world.open_both(save_every=1, local_save_every=0) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 4
        save_all(ckpt, world, 6, 12)
    first, second = (life_of(world, step) for step in (8, 12))
    assert first != second
    assert number_of(first) == number_of(second)
    world.lose_ram()
    elsewhere.rename(world.ramdisk)
    with world.open_both(save_every=1, local_save_every=1) as ckpt:
        assert world.restores(12, by=ckpt) is not None
        save_all(ckpt, world, 13)
        assert complete_steps(str(world.persistent)) == [4, 6, 12, 13]
