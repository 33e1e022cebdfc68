"""keep_last_n with a stored step that is damaged, and a save that fails after it."""

from __future__ import annotations

import pytest
from faults import storage_fails
from persistent_steps import complete_steps
from world import World, same, save_all

from emergency_ckpt.errors import SaveFailed

STAGES = ["write_document", "write_tensors", "finish", "publish"]


def damage(world: World, step: int) -> None:
    """Change a bit of every file with arrays of the step; its marker and its index stay."""
    item = world.persistent / str(step) / "state"
    for path in item.glob("**/d/*"):
        path.write_bytes(bytes(each ^ 4 for each in path.read_bytes()))


def read(world: World) -> int | None:
    """Return the step that another job finds in storage, after a look at its bits."""
    reader = {"local_dir": str(world.ramdisk.with_name("reader")), "save_every": 0}
    with world.open_both(**reader) as checkpointer:
        step, state = checkpointer.restore(state=world.state(0), host_state={})
    assert same(state, world.state(step or 0))
    return step


@pytest.mark.parametrize("stage", STAGES)
def test_step_before_a_damaged_one_stays_until_a_save_is_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Nothing but the step that was restored is sound, and the first save of the life fails."""
    with world.open_both(keep_last_n=2) as checkpointer:
        save_all(checkpointer, world, 2, 4)
    damage(world, 4)
    world.lose_ram()
    with world.open_both(keep_last_n=1) as checkpointer:
        assert checkpointer.restore(state=world.state(0), host_state={})[0] == 2
        with monkeypatch.context() as patch:
            storage_fails(patch, stage)
            assert checkpointer.save(step=6, state=world.state(6), host_state={"at": 6})
            checkpointer.wait_until_finished()
        with pytest.raises(SaveFailed, match="storage failed"):
            checkpointer.check_for_errors()
        # With both its markers a step is whole, also when no version lists it yet.
        assert read(world) == (6 if stage == "publish" else 2)
        save_all(checkpointer, world, 8)
        assert complete_steps(str(world.persistent)) == [8]
    assert read(world) == 8
