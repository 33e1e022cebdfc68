"""The directory of a job that runs is gone: saves there fail and say so, until it is back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from looks import tree_of
from mounts import mount_again, unmount
from world import STORAGE, World, finish, logged, save, save_all, small_tmpfs

from emergency_ckpt.errors import PersistentTierError, SaveFailed


class Loss(NamedTuple):
    """Of a job's ``directory`` the ``path`` goes; ``back``: None where it is gone for good."""

    directory: Path
    path: Path
    lose: Callable[[], object]
    back: Callable[[], object] | None


LOSSES = ("unmounted", "unmounted itself", "moved", "removed", "log moved", "older copy")


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest, world: World) -> Iterator[Loss]:
    top = world.persistent.parent
    kept = top / "kept"
    if request.param.startswith("unmounted"):
        disk, mount = top / "disk", top / "mount"
        directory = mount if request.param == "unmounted itself" else mount / "run"
        with small_tmpfs(disk, 16 << 20):
            mount.mkdir()
            mount_again(disk, mount)
            yield Loss(directory, mount, lambda: unmount(mount), lambda: mount_again(disk, mount))
            unmount(mount)
        return
    directory, log = world.persistent, world.persistent / "host_state" / "log"
    path = log if request.param == "log moved" else directory

    match request.param:
        case "removed":
            yield Loss(directory, path, lambda: shutil.rmtree(path), None)
        case "older copy":
            # The first life claims, and saves twice.
            newest = log / f"{3:012d}.json"

            def go_back() -> None:
                (log / "newest").unlink()
                newest.rename(kept)

            yield Loss(directory, log, go_back, lambda: kept.rename(newest))
        case _:
            yield Loss(directory, path, lambda: path.rename(kept), lambda: kept.rename(path))


def test_loss_of_storage_is_told_and_nothing_begins_anew(world: World, loss: Loss) -> None:
    world.persistent = loss.directory
    with logged() as lines, world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 4, 6)
        loss.lose()
        left = tree_of(loss.path.parent)
        for step in (8, 10):
            assert save(ckpt, world, step, force=True)
            with pytest.raises(SaveFailed, match=r"has seen version .* bring it back"):
                finish(ckpt)
        assert tree_of(loss.path.parent) == left
        (lost,) = world.named("persistent.problem", cause="log_lost")
        (line,) = [line for line in lines if line.startswith("persistent.problem.log_lost: ")]
        assert str(lost.fields["reason"]) in line
        assert [e.fields["step"] for e in world.events if e.name == "persistent.failed"] == [8, 10]
        with pytest.raises(PersistentTierError, match="has seen version"):
            ckpt.restore(state=world.state(0))
        if loss.back is None:
            return
        loss.back()
        assert save(ckpt, world, 12, force=True)
        finish(ckpt)
    world.lose_ram()
    world.restores(12, host=True)
    assert len(world.named("persistent.problem", cause="log_lost")) == 1


def test_loss_before_the_first_save_of_a_life_is_told(world: World) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 4)
    kept = world.persistent.rename(world.persistent.with_name("kept"))
    kept.rename(world.persistent)
    with world.open_both(**STORAGE) as ckpt:
        world.persistent.rename(kept)
        assert save(ckpt, world, 6)
        with pytest.raises(SaveFailed, match="has seen version"):
            finish(ckpt)
        assert not world.persistent.exists()
        kept.rename(world.persistent)
        assert save(ckpt, world, 8, force=True)
        finish(ckpt)


def test_return_without_storage_begins_nothing_anew(world: World) -> None:
    """The rollback in storage, at the end of the restore, has a writer of its own."""
    with world.open_both(save_every=2, local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 2, 4)
        kept = world.persistent.rename(world.persistent.with_name("kept"))
        world.restores(2, asked=2, by=ckpt)
        assert not world.persistent.exists()
        kept.rename(world.persistent)
        assert save(ckpt, world, 3, force=True)
        finish(ckpt)
    world.lose_ram()
    world.restores(3)
