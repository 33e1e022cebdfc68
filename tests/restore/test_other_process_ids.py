"""A process that comes back under another id, with the RAM of its former life."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from world import World, same, save_all

from emergency_ckpt.save import Outcome, Vote

RUN, FORMER, OWN = "run", "process_00003", "process_00000"


def saved(directory: Path) -> dict[int, str]:
    """The incarnation of each step that is published in a process directory."""
    files = [json.loads(path.read_bytes()) for path in directory.glob("slot_*.manifest.json")]
    saves = [file["manifest"]["contents"]["save"] for file in files]
    return {save["step"]: save["incarnation"] for save in saves}


def restore(checkpointer: Any, world: World) -> int | None:
    step, state = checkpointer.restore(state=world.state(0), host_state={})
    assert step is None or same(state, world.state(step))
    return step


def test_restore_takes_the_ram_of_a_former_process_id(world: World) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
    run = world.ramdisk / RUN
    older = Path(shutil.copytree(run / OWN, world.ramdisk / "older"))
    with world.open() as checkpointer:
        assert restore(checkpointer, world) == 1
        save_all(checkpointer, world, 2)
    (run / OWN).rename(run / FORMER)
    older.rename(run / OWN)
    with world.open() as checkpointer:
        assert restore(checkpointer, world) == 2
        assert (run / FORMER).is_dir(), "it is needed until a later step is whole"
        save_all(checkpointer, world, 3)
        assert not (run / FORMER).exists(), sorted((run / FORMER).rglob("*"))
    with world.open() as checkpointer:
        assert restore(checkpointer, world) == 3


def test_former_ram_stays_while_no_newer_step_is_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open() as checkpointer:
        save_all(checkpointer, world, 1)
    run = world.ramdisk / RUN
    (run / OWN).rename(run / FORMER)
    (run / OWN).mkdir(mode=0o700)
    with monkeypatch.context() as others, world.open() as checkpointer:
        assert restore(checkpointer, world) == 1
        others.setattr(
            Vote, "cast", lambda *_, **__: Outcome("incomplete", "another process failed")
        )
        checkpointer.save(step=2, state=world.state(2), host_state={"at": 2})
        checkpointer.wait_until_finished()
        assert (run / FORMER).is_dir()
    shutil.rmtree(run / OWN)
    with world.open() as checkpointer:
        assert restore(checkpointer, world) == 1


def test_saves_after_a_restore_have_a_newer_incarnation(world: World) -> None:
    lives: list[str] = []
    for step in (1, 2, 3):
        with world.open() as checkpointer:
            assert restore(checkpointer, world) == (step - 1 or None)
            save_all(checkpointer, world, step)
        lives.append(saved(world.ramdisk / RUN / OWN)[step])
    assert lives == sorted(set(lives)), lives
