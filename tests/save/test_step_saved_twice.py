"""One step saved twice: it is kept, or replaced once its successor is whole; never lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from faults import call_fails, storage_fails
from world import World, check_restored, finish, save, save_all

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.ram import LocalTier
from emergency_ckpt.storage import DirectoryWriter, PersistentTier


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_save_step_again_by_force_keeps_it(world: World, waits: bool, is_preempted: bool) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 1)
        if is_preempted:
            preempt()
        assert save(checkpointer, world, 2)
        if waits:
            checkpointer.wait_until_finished()
        assert not save(checkpointer, world, 2, force=True)
        finish(checkpointer)
        assert checkpointer.failed_saves == 0
    check_restored(world, 2)


def test_save_preempted_at_restored_step_keeps_it(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2)
    for _ in world.each_tier():
        with world.open_both() as checkpointer:
            assert checkpointer.restore(state=world.state(0), host_state={"at": 0})[0] == 2
            preempt()
            save(checkpointer, world, 2)
            assert not save(checkpointer, world, 2, force=True)
            finish(checkpointer)
            assert checkpointer.all_steps() == [2]
    check_restored(world, 2)


def test_save_forced_at_step_restored_from_ram_fills_storage(world: World) -> None:
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 3)
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0), host_state={"at": 0})[0] == 3
        assert save(checkpointer, world, 3, force=True)
        finish(checkpointer)
    check_restored(world, 3)


@pytest.mark.parametrize("where", ["write_document", "write_tensors", "finish", "publish"])
def test_save_forced_after_failure_saves_what_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    storage_fails(monkeypatch, where, once=True)
    with world.open_both() as checkpointer:
        assert save(checkpointer, world, 2)
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
        assert save(checkpointer, world, 2, force=True)
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
        assert world.names().count("save.complete") == 1, "RAM has it already"
        # With both its markers it was whole before.
        kept = world.named("save.skipped", tier="persistent", cause="kept")
        complete = world.named("persistent.complete")
        assert (len(kept), len(complete)) == ((1, 0) if where == "publish" else (0, 1))
    check_restored(world, 2)


@pytest.mark.parametrize(
    ("owner", "name"), [(PersistentTier, "finish"), (DirectoryWriter, "publish")]
)
def test_save_forced_after_unheard_success_keeps_it(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Marker or version was written, but not the answer heard: what is whole must not go."""
    works: Callable[..., Any] = getattr(owner, name)

    def unheard(*args: Any, **kwargs: Any) -> None:
        works(*args, **kwargs)
        raise PersistentTierError("save", "step 2", "no answer came")

    with world.open_both() as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, unheard)
            assert save(checkpointer, world, 2)
            checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
        storage_fails(monkeypatch, "write_tensors")
        save(checkpointer, world, 2, force=True)
        checkpointer.wait_until_finished()
        assert checkpointer.failed_saves == 1
        assert world.named("save.skipped", tier="persistent", cause="kept")
    check_restored(world, 2)


def test_save_of_step_stored_under_another_demand_cannot_lose_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM has the step of a later demand of the same life; storage has that of the first."""
    with monkeypatch.context() as patch:
        call_fails(patch, LocalTier, "publish_host_state", once=True)
        with world.open_both() as checkpointer:
            assert save(checkpointer, world, 2)
            checkpointer.wait_until_finished()
            assert save(checkpointer, world, 2, force=True)
            checkpointer.wait_until_finished()
    storage_fails(monkeypatch, "write_tensors")
    with world.open_both() as checkpointer:
        assert checkpointer.restore(state=world.state(0), host_state={"at": 0})[0] == 2
        save(checkpointer, world, 2, force=True)
        finish(checkpointer)
    check_restored(world, 2)
