"""A stored step is loaded a bounded number of times, and not passed over while storage is down."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest
from damage import flip
from faults import shards_in_ram_look_damaged
from world import STORAGE, World, save_all

from emergency_ckpt.errors import RestoreFailed, StorageUnreachable, Unrecoverable
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.steps import StoredSteps
from emergency_ckpt.work_progress import WorkProgress


@pytest.fixture
def stored(world: World) -> World:
    """A world with steps 2 and 4 in storage, and nothing in RAM."""
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2, 4)
    world.lose_ram()
    world.events.clear()
    return world


def loads(world: World) -> list[object]:
    return [event.fields["step"] for event in world.named("restore.stage", stage="loaded")]


def test_step_that_failed_in_ram_is_loaded_once_more(
    stored: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_in_ram_look_damaged(monkeypatch, 1)
    with stored.open_both() as checkpointer:
        _held = stored.restores(4, host=True, by=checkpointer)
        assert loads(stored) == [4, 4]
        save_all(checkpointer, stored, 5)


def test_each_stored_step_is_loaded_at_most_twice(
    stored: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_in_ram_look_damaged(monkeypatch, float("inf"))
    with stored.open_both() as checkpointer:
        with pytest.raises(Unrecoverable, match="was loaded from storage 2 times"):
            checkpointer.restore(state=stored.state(0), host_state={})
        assert loads(stored) == [4, 4, 2, 2]
        monkeypatch.undo()
        assert checkpointer.restore(state=stored.state(0), host_state={})[0] == 4


def test_restore_after_16_damaged_steps_takes_the_17th(world: World) -> None:
    state = {"w": jnp.arange(4096.0)}
    with world.open_both(**STORAGE) as checkpointer:
        for step in range(1, 18):
            checkpointer.save(step=step, state=state)
            checkpointer.wait_until_finished()
    for step in range(2, 18):
        chunks = [path for path in (world.persistent / str(step)).rglob("d/*") if path.is_file()]
        flip(max(chunks, key=lambda path: path.stat().st_size))
    world.lose_ram()
    world.events.clear()
    with world.open_both(**STORAGE) as checkpointer:
        assert checkpointer.restore(state=state)[0] == 1
    assert len(world.named("restore.stage", stage="replanned")) == 16


def test_damage_in_ram_leads_to_storage_before_an_older_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is in both tiers: damaged in RAM, it is loaded, although RAM has step 3 too."""
    with world.open_both(local_keep_last_n=2) as checkpointer:
        save_all(checkpointer, world, 2, 3, 4)
    shards_in_ram_look_damaged(monkeypatch, 2)
    world.events.clear()
    with world.open_both(local_keep_last_n=2) as checkpointer:
        world.restores(4, host=True, by=checkpointer)
        assert loads(world) == [4]


@pytest.mark.parametrize("nbytes", [0, 100])
def test_storage_that_breaks_off_each_time_ends_the_load(
    stored: World, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """What comes a second time is no progress: far from the total of four hours."""

    def fail(self: PersistentTier, *_: object, progress: WorkProgress, **__: object) -> object:
        progress.add(nbytes) if nbytes else None
        raise self.storage.error("read", "/4", ConnectionResetError("scripted"))

    monkeypatch.setattr(PersistentTier, "read_into", fail)
    with stored.open_both(stall_timeout_s=1.0) as checkpointer:
        began_s = time.monotonic()
        with pytest.raises(StorageUnreachable, match="not lost"):
            checkpointer.restore(state=stored.state(0), host_state={})
        assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("sees_step", [False, True])
def test_host_without_the_mount_costs_no_step(
    stored: World, monkeypatch: pytest.MonkeyPatch, sees_step: bool
) -> None:
    """Process 0 has planned with step 4; where it is read, its file or all of it is missing."""

    def fail(self: PersistentTier, item: str, *_: object, **__: object) -> object:
        raise self.storage.error("read", item, FileNotFoundError("scripted"))

    with monkeypatch.context() as patch, stored.open_both() as checkpointer:
        patch.setattr(PersistentTier, "read_into", fail)
        if sees_step:  # the step is damaged, and so is step 2
            with pytest.raises(Unrecoverable):
                checkpointer.restore(state=stored.state(0), host_state={})
        else:
            patch.setattr(StoredSteps, "find", lambda *_: None)
            with pytest.raises(RestoreFailed, match="process 0 sees the step there, and this host"):
                checkpointer.restore(state=stored.state(0), host_state={})
    with stored.open_both() as checkpointer:
        assert checkpointer.restore(state=stored.state(0), host_state={})[0] == 4


@pytest.mark.parametrize("method", ["describe", "read_into"])
def test_storage_that_fails_after_planning_costs_no_step(
    stored: World, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Not for a while, and not until the deadline: it is said, and nothing is taken for gone."""
    working = getattr(PersistentTier, method)
    failures = [None] * 2

    def fail(self: PersistentTier, *args: object, **more: object) -> object:
        if failures:
            failures.pop()
            raise self.storage.error("read", "/4", ConnectionResetError("scripted"))
        return working(self, *args, **more)

    monkeypatch.setattr(PersistentTier, method, fail)
    with stored.open_both(total_timeout_s=20.0) as checkpointer:
        if method == "describe":  # its own calls are repeated within the tier
            with pytest.raises(StorageUnreachable, match="not lost") as failed:
                checkpointer.restore(state=stored.state(0), host_state={})
            assert failed.value.retryable
            assert "remove" not in str(failed.value)
            failures.clear()
        assert checkpointer.restore(state=stored.state(0), host_state={})[0] == 4
