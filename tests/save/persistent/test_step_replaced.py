"""A stored step whose number another life saves again counts until a save of that life is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
import pytest
from faults import storage_fails
from persistent_steps import complete_steps
from world import STORAGE, World, same, save_all, storage_lacks

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import SaveFailed

STAGES = ["write_document", "write_tensors", "finish", "publish"]


@pytest.fixture
def world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Its states have no array without elements: plain Orbax saves none."""
    whole = world.state

    def state(step: int) -> dict[str, Any]:
        return {name: leaf for name, leaf in whole(step).items() if name != "empty"}

    monkeypatch.setattr(world, "state", state)
    return world


def old_life(world: World, *steps: int, **settings: Any) -> None:
    with world.open_both(**STORAGE, **settings) as ckpt:
        save_all(ckpt, world, *steps)


def old_plain_life(world: World, *steps: int, **_: Any) -> None:
    with ocp.CheckpointManager(world.persistent) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(world.state(step)))


def save_another(ckpt: EmergencyCheckpointer, world: World, step: int) -> None:
    """A save of ``step`` with what belongs to a later one."""
    ckpt.save(step=step, state=world.state(step + 100), host_state={"at": step + 100})
    ckpt.wait_until_finished()


def fail_to_save(world: World, step: int, **settings: Any) -> None:
    """In a life that restores nothing: what counts is kept."""
    with storage_lacks(step), world.open_both(**STORAGE, **settings) as ckpt:
        save_another(ckpt, world, step)
        assert ckpt.failed_saves == 1


def restored(world: World, **settings: Any) -> tuple[int | None, int]:
    """The step, and the number that its bytes are made of."""
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        step, state = ckpt.restore(state=world.state(0))
        value = int(state["step"])
        assert same(state, world.state(value))
        return step, value


@pytest.mark.dear
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", [old_life, old_plain_life])
def test_step_of_another_life_outlives_a_failed_save(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str, write: Callable[..., None]
) -> None:
    """Its number fails until the life that restored nothing has saved another one."""
    write(world, 2, 4)
    with monkeypatch.context() as patch:
        storage_fails(patch, stage)
        fail_to_save(world, 3)
    world.lose_ram()
    assert restored(world) == (4, 4)
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt:
        save_another(ckpt, world, 4)
        with pytest.raises(SaveFailed, match="has the same number, and counts"):
            ckpt.check_for_errors()
        save_another(ckpt, world, 5)
        ckpt.check_for_errors()
        assert ckpt.all_steps() == [5]
    world.lose_ram()
    assert restored(world) == (5, 105)


def garble(world: World, step: int) -> Callable[[], object]:
    """Make the marker of ``step`` unreadable for a while; how to end that."""
    path = world.persistent / "host_state" / str(step) / "marker.json"
    data = path.read_bytes()
    path.write_bytes(b"{")
    return lambda: path.write_bytes(data)


@pytest.mark.dear
@pytest.mark.parametrize(("step", "local"), [(3, 0), (3, 1), (4, 0)])
@pytest.mark.parametrize("stage", STAGES)
def test_step_passed_over_outlives_a_failed_save(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str, step: int, local: int
) -> None:
    """It is readable again when this life's first save to storage fails, and all RAM is lost."""
    old_life(world, 2, 4)
    world.lose_ram()
    mend = garble(world, 4)
    with storage_lacks(step), world.open_both(save_every=1, local_save_every=local) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        mend()
        with monkeypatch.context() as patch:
            storage_fails(patch, stage)
            save_another(ckpt, world, step)
            assert ckpt.failed_saves == 1
    world.lose_ram()
    assert restored(world) == (4, 4)


@pytest.mark.parametrize("is_forced", [False, True])
def test_step_whose_arrays_are_damaged_is_replaced(world: World, is_forced: bool) -> None:
    old_life(world, 2, 4)
    world.lose_ram()
    for path in (world.persistent / "4" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        ckpt.save(step=4, state=world.state(104), force=is_forced)
        ckpt.wait_until_finished()
        ckpt.check_for_errors()
        assert ckpt.all_steps() == [2, 4]
    world.lose_ram()
    assert restored(world) == (4, 104)


@pytest.mark.parametrize(("stage", "left"), [("write_document", (2, 2)), ("publish", (4, 104))])
def test_save_to_ram_makes_a_step_passed_over_past(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str, left: tuple[int, int]
) -> None:
    """A restore goes back to where that life began, or to its own save, where that is whole."""
    old_life(world, 2, 4)
    world.lose_ram()
    mend = garble(world, 4)
    with storage_lacks(4), world.open_both(save_every=4, local_save_every=1) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        mend()
        ckpt.save(step=3, state=world.state(3), host_state={"at": 3})
        ckpt.wait_until_finished()
        with monkeypatch.context() as patch:
            storage_fails(patch, stage)
            save_another(ckpt, world, 4)
            assert ckpt.failed_saves == 1
    world.lose_ram()
    assert restored(world) == left


def test_step_passed_over_is_past_once_a_save_is_whole(world: World) -> None:
    old_life(world, 2, 4)
    world.lose_ram()
    mend = garble(world, 4)
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        mend()
        save_another(ckpt, world, 3)
        ckpt.check_for_errors()
    world.lose_ram()
    assert restored(world) == (3, 103)
    assert [path.name[:8] for path in world.persistent.glob("*.rolled-back-*")] == ["4.rolled"]


def test_step_replaced_by_a_failed_save_goes_with_retention(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_life(world, 2, 4)
    with monkeypatch.context() as patch:
        storage_fails(patch, "write_tensors")
        fail_to_save(world, 4)
    world.lose_ram()
    with world.open_both(**STORAGE, keep_last_n=2) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 4
        save_all(ckpt, world, 5)
        assert ckpt.all_steps() == [4, 5]
        save_all(ckpt, world, 6)
    assert complete_steps(str(world.persistent)) == [5, 6]
    assert sorted(path.name for path in world.persistent.iterdir()) == ["5", "6", "host_state"]


def test_step_replaced_then_kept_is_saved_no_second_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the very step that was restored: a forced save of it has nothing to do."""
    old_life(world, 4)
    with monkeypatch.context() as patch:
        storage_fails(patch, "write_tensors")
        fail_to_save(world, 4)
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt, monkeypatch.context() as patch:
        assert ckpt.restore(state=world.state(0))[0] == 4
        storage_fails(patch, "write_tensors")
        ckpt.save(step=4, state=world.state(4), force=True)
        ckpt.wait_until_finished()
        assert ckpt.failed_saves == 0
    world.lose_ram()
    assert restored(world) == (4, 4)


@pytest.mark.dear
def test_restore_of_an_older_step_rolls_a_replaced_one_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_life(world, 2, 4)
    with monkeypatch.context() as patch:
        storage_fails(patch, "publish")
        fail_to_save(world, 4)
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
    world.lose_ram()
    assert restored(world) == (3, 3)
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 3
        save_another(ckpt, world, 4)
        ckpt.check_for_errors()
    world.lose_ram()
    assert restored(world) == (4, 104)
