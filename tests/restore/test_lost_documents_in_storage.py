"""The folder of a step's host states is removed in storage, and RAM has that step or another."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from world import World, finish, same, save_all

from emergency_ckpt.errors import HostStateError


def save_in_both(world: World, *steps: int) -> None:
    with world.open_both(save_every=1) as ckpt:
        save_all(ckpt, world, *steps)


def lose_documents(world: World, step: int) -> None:
    shutil.rmtree(world.persistent / "host_state" / str(step))


def restored(world: World, **settings: Any) -> tuple[int | None, str]:
    with world.open_both(**settings) as ckpt:
        step, state = ckpt.restore(state=world.state(0), host_state={})
        report = ckpt.last_restore
        assert step is not None
        assert report is not None
        assert same(state, world.state(step))
        return step, report.tier


def test_step_without_documents_in_storage_comes_from_ram(world: World) -> None:
    save_in_both(world, 2, 4)
    lose_documents(world, 4)
    assert restored(world) == (4, "local")
    assert restored(world) == (4, "local")


def test_step_without_documents_and_ram_is_no_older_step(world: World) -> None:
    save_in_both(world, 2, 4)
    lose_documents(world, 4)
    world.lose_ram()
    with pytest.raises(HostStateError, match="step 4: it has tensors only"):
        restored(world)
    step, tier = restored(world, allow_missing_host_state=True)
    assert (step, tier) == (4, "persistent")


def test_newer_step_in_ram_hides_one_without_documents(world: World) -> None:
    save_in_both(world, 2)
    with world.open_both(save_every=0) as ckpt:
        ckpt.restore(state=world.state(0), host_state={})
        save_all(ckpt, world, 3)
    lose_documents(world, 2)
    assert restored(world) == (3, "local")


def test_step_saved_again_beside_its_lost_documents_is_whole(world: World) -> None:
    save_in_both(world, 2, 4)
    lose_documents(world, 4)
    with world.open_both(save_every=1) as ckpt:
        assert ckpt.restore(state=world.state(0), host_state={})[0] == 4
        assert ckpt.save(step=4, state=world.state(4), host_state={}, force=True)
        finish(ckpt)
    world.lose_ram()
    assert restored(world) == (4, "persistent")
