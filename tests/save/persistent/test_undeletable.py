"""What cannot be deleted from storage stays, is told, and fails no save."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from mounts import mount_tmpfs, unmount
from programs import printed_beside_bucket
from world import STORAGE, World, finish, save, save_all

from emergency_ckpt.errors import PersistentTierError


def failed_in(lives: list[dict[str, Any]]) -> list[list[int]]:
    """The step that each error names which a life was given: all are errors of saves."""
    matches = [[re.match(r"save step (\d+) ", error) for error in life["errors"]] for life in lives]
    assert all(all(each) for each in matches), lives
    return [[int(match[1]) for match in each if match] for each in matches]


@pytest.mark.parametrize("case", ["keep_last_n", "failed_save"])
def test_lives_save_in_a_bucket_that_deletes_nothing(case: str) -> None:
    """``keep_last_n``: removals are refused. ``failed_save``: so are remains of a save."""
    lives = printed_beside_bucket("undeletable_program.py", case)
    failed = [2] if case == "failed_save" else []
    assert [each["failed"] for each in lives] == [failed, [], []]
    assert [each["restored"] for each in lives] == [None, 4, 8]
    assert all(each["same"] for each in lives)
    assert [each["complete"] for each in lives] == [
        [step for step in (2, 4) if step not in failed],
        [6, 8],
        [10, 12],
    ]
    assert failed_in(lives) == [failed, [], []]
    for each in lives:
        assert all("storage.objects.delete" in reason for reason in each["kept"]), each
        assert each["kept"], "what stays is told"


@pytest.mark.parametrize("case", ["hidden", "rollback"])
def test_rolled_back_step_that_cannot_be_deleted_fails_one_save(case: str) -> None:
    """``hidden``: it was hidden while that was allowed. ``rollback``: to hide it is refused too."""
    lives = printed_beside_bucket("undeletable_program.py", case)
    assert [each["restored"] for each in lives] == [None, 2, 3, 6]
    assert all(each["same"] for each in lives)
    assert [each["complete"] for each in lives] == [[2, 4], [3], [6], [8]]
    assert [each["failed"] for each in lives] == failed_in(lives) == [[], [], [4], []]
    assert "storage.objects.delete" in lives[2]["errors"][0]
    told = [any("storage.objects.delete" in reason for reason in each["kept"]) for each in lives]
    assert told == [False, case == "rollback", True, True]


@contextlib.contextmanager
def busy(world: World, step: int) -> Iterator[None]:
    """A file system is mounted inside a step: its folder cannot be removed."""
    name = "mounted"
    path = world.persistent / str(step) / name
    path.mkdir()
    if not mount_tmpfs(path, 1 << 20):
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        yield
    finally:
        for path in world.persistent.glob(f"{step}*/{name}"):  # it may have been moved
            unmount(path)


def test_lives_save_beside_a_step_on_a_disk_that_is_busy(world: World) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4)
    with busy(world, 2):
        for step in (6, 8):
            with world.open_both(**STORAGE, keep_last_n=1) as ckpt:
                world.restores(step - 2, by=ckpt)
                assert save(ckpt, world, step)
                ckpt.wait_until_finished()
        assert "persistent.failed" not in world.names()
        world.wait_for("persistent.removal", stage="failed", step=2)
    with world.open_both(**STORAGE, keep_last_n=1) as ckpt:
        world.restores(8, by=ckpt)
        save_all(ckpt, world, 10)
    assert not (world.persistent / "2").exists()
    world.lose_ram()
    world.restores(10)


def test_removal_on_request_says_what_it_could_not_remove(world: World) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4)
        with busy(world, 2):
            with pytest.raises(PersistentTierError, match="busy"):
                ckpt.steps.remove(2)
            assert save(ckpt, world, 6)
            finish(ckpt)
        ckpt.steps.remove(2)
        assert not (world.persistent / "2").exists()
