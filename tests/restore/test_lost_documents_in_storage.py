"""The folder of a step's host states is removed in storage, and RAM has that step or another."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from world import World, finish, logged, same, save_all

from emergency_ckpt.errors import StepNotFound, Unrecoverable


def save_in_both(world: World, *steps: int) -> None:
    with world.open_both(save_every=1) as ckpt:
        save_all(ckpt, world, *steps)


def lose_documents(world: World, step: int) -> None:
    shutil.rmtree(world.persistent / "host_state" / str(step))


def restored(world: World, *, is_alone: bool = False, **settings: Any) -> tuple[int | None, str]:
    """``is_alone``: the tensors, without a host state."""
    with world.open_both(**settings) as ckpt:
        step, state = ckpt.restore(state=world.state(0), host_state=None if is_alone else {})
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


@pytest.mark.parametrize("besides", ["nothing", "log", "metadata"])
def test_step_without_documents_and_ram_does_not_count(world: World, besides: str) -> None:
    """Log or metadata say that this package wrote it, and its steps have two markers each."""
    save_in_both(world, 2, 4)
    lose_documents(world, 4)
    if besides == "log":
        shutil.rmtree(world.persistent / "host_state" / "log")
    if besides == "metadata":
        (world.persistent / "4" / "_CHECKPOINT_METADATA").write_bytes(b"{")
    for is_alone, expected in ((True, 4), (False, 2)):
        world.lose_ram()
        with logged() as lines:
            assert restored(world, save_every=0, is_alone=is_alone) == (expected, "persistent")
        told = [line for line in lines if line.startswith("step 4 in ")]
        assert len(told) == (expected == 2)
        assert all("host states and their marker" in line for line in told)
    rejected = [e.fields["reason"] for e in world.events if e.name == "restore.rejected"]
    assert any("call restore without host_state" in reason for reason in rejected)


def test_only_step_without_documents_is_no_fresh_start(world: World) -> None:
    save_in_both(world, 2)
    lose_documents(world, 2)
    world.lose_ram()
    with pytest.raises(Unrecoverable, match=r"step 2.*call restore without host_state"):
        restored(world)
    with pytest.raises(StepNotFound, match="call restore without host_state"):
        world.restores(2, asked=2, host=True)


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
