"""Steps that were rolled back: `eckpt ls`, a restore by number, and `eckpt doctor --clean`."""

from __future__ import annotations

from pathlib import Path

import pytest
from looks import eckpt, eckpt_json
from world import STORAGE, World, save_all

from emergency_ckpt.errors import StepNotFound


@pytest.fixture
def rolled_back(world: World) -> World:
    """Steps 2, 4, 6, 8, of which the last three were rolled back, and 4 was saved again."""
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4, 6, 8)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(2, state=world.state(0))
        save_all(ckpt, world, 4)
    world.lose_ram()
    return world


def hidden(directory: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in directory.rglob("*.rolled-back-*"))


def restored(world: World, step: int | None = None) -> int | None:
    with world.open_both(**STORAGE) as ckpt:
        found, _ = ckpt.restore(step, state=world.state(0))
    world.lose_ram()
    return found


def test_ls_lists_steps_that_were_rolled_back(rolled_back: World) -> None:
    status, listed = eckpt_json("ls", "--dir", rolled_back.persistent)
    assert status == 0
    found = {(each["step"], each["state"]) for each in listed["steps"]}
    assert found == {(2, "whole"), (4, "whole"), (6, "rolled_back"), (8, "rolled_back")}
    assert eckpt("ls", "--dir", rolled_back.persistent).stdout.count("6.rolled-back-") == 2


def test_clean_lists_them_and_removes_them_when_told(rolled_back: World) -> None:
    world = rolled_back
    directory = world.persistent
    listed = eckpt("doctor", "--clean", "--dir", directory, "--older-than", "0")
    assert listed.returncode == 0
    assert listed.stdout.count("would be removed") == 2
    assert (
        eckpt("doctor", "--clean", "--dir", directory, "--yes").stdout.count(
            "stays: not old enough"
        )
        == 2
    )
    assert hidden(directory) == ["6.rolled", "8.rolled"]
    done = eckpt("doctor", "--clean", "--dir", directory, "--older-than", "0", "--yes")
    assert (done.returncode, done.stdout.count("removed")) == (0, 2), done
    assert hidden(directory) == []
    with pytest.raises(StepNotFound):
        restored(world, 6)
    assert restored(world) == 4
