"""``latest_step`` and ``all_steps`` name what is whole, soon, whatever storage does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from faults import SlowStorage, listings_give_up_soon
from world import World, save_all

from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import StorageDirectory

LONG_S = 60.0


def test_steps_of_silent_storage_are_those_of_ram(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 3)
        assert checkpointer.all_steps() == [2, 3]

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to storage")

    # Else each of these calls would be repeated for half an hour.
    listings_give_up_soon(monkeypatch)
    with world.open_both(total_timeout_s=1800.0) as checkpointer:
        monkeypatch.setattr(StorageDirectory, "forget_listings", unreachable)
        assert (checkpointer.all_steps(), checkpointer.latest_step()) == ([3], 3)
        assert world.named("persistent.problem", cause="unreachable")
    monkeypatch.undo()
    listings_give_up_soon(monkeypatch)
    world.lose_ram()
    with world.open_both(total_timeout_s=1800.0) as checkpointer:
        monkeypatch.setattr(StorageDirectory, "forget_listings", unreachable)
        with pytest.raises(PersistentTierError, match="no route to storage"):
            checkpointer.latest_step()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    found = SlowStorage(monkeypatch)
    yield found
    found.go_on.set()


def manager_of(root: Path, **local: Any) -> emergency.CheckpointManager:
    """Return a manager of one slice: of storage alone, unless ``local`` are options of RAM."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    return emergency.CheckpointManager(
        root / "local",
        root / "persistent",
        mesh,
        state_of(0),
        options=emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(with_one_slice=bool(local), **local),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=2),
        ),
    )


def state_of(step: int) -> dict[str, Any]:
    return {"w": jax.numpy.full(8, step)}


def save(manager: emergency.CheckpointManager, step: int) -> bool:
    return manager.save(step, ocp.args.Composite(state=ocp.args.PyTreeSave(state_of(step))))


@pytest.mark.parametrize("fails", [False, True])
def test_manager_names_a_step_once_it_is_whole(
    world: World, storage: SlowStorage, fails: bool
) -> None:
    storage.fails = fails
    with manager_of(world.ramdisk.parent) as manager:
        assert manager.latest_step() is None
        assert save(manager, 2)
        assert storage.reached.wait(LONG_S)
        assert (manager.latest_step(), manager.all_steps(), manager.all_steps(read=False)) == (
            None,
            [],
            [],
        )
        storage.go_on.set()
        if fails:
            with pytest.raises(Exception, match="no space left"):
                manager.wait_until_finished()
        else:
            manager.wait_until_finished()
        whole = [] if fails else [2]
        assert manager.all_steps() == manager.all_steps(read=False) == whole
        assert manager.latest_step() == (whole or [None])[-1]
        storage.fails = False
        assert save(manager, 4)
        manager.wait_until_finished()
        assert (manager.latest_step(), manager.all_steps()) == (4, [*whole, 4])


@pytest.mark.parametrize("deleted", [5, 7])
def test_manager_forgets_a_step_deleted_from_ram(world: World, deleted: int) -> None:
    """The newest one, or one before it that RAM has kept."""
    with manager_of(world.ramdisk.parent, save_interval_steps=1, max_to_keep=3) as manager:
        for step in (3, 5, 7):
            assert save(manager, step)
        manager.wait_until_finished()
        assert manager.all_steps() == manager.all_steps(read=True) == [3, 5, 7]
        manager.delete(deleted)
        left = [step for step in (3, 5, 7) if step != deleted]
        assert manager.all_steps() == manager.all_steps(read=True) == left
        assert save(manager, 9)
        manager.wait_until_finished()
        assert manager.all_steps() == manager.all_steps(read=True) == [*left, 9]


def test_manager_forgets_a_step_that_was_deleted(world: World) -> None:
    with manager_of(world.ramdisk.parent) as manager:
        for step in (2, 4):
            assert save(manager, step)
        manager.wait_until_finished()
        manager.delete(4)
        assert (manager.latest_step(), manager.all_steps()) == (2, [2])
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state_of(4)))
        assert manager.save(4, args, force=True)
        manager.wait_until_finished()
        assert (manager.latest_step(), manager.all_steps()) == (4, [2, 4])
