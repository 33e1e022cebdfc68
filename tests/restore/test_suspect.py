"""A step that ends the lives that begin from it: it is named; an older one is taken on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from looks import eckpt_here
from world import World, finish, same

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.storage import DirectoryWriter

STORAGE: dict[str, Any] = {"local_save_every": 0, "save_every": 1}
BOTH: dict[str, Any] = {"save_every": 2}


class Crash(Exception):
    """Ends a life."""


@contextlib.contextmanager
def crashing(world: World, **settings: Any) -> Iterator[EmergencyCheckpointer]:
    """Open a life that an exception ends."""
    with contextlib.suppress(Crash), world.open_both(**settings) as ckpt:
        yield ckpt
        raise Crash


def restored(ckpt: EmergencyCheckpointer, world: World, step: int | None = None) -> int | None:
    found, state = ckpt.restore(step, state=world.state(0), host_state={"at": 0})
    assert found is None or same(state, world.state(found))
    return found


def save(ckpt: EmergencyCheckpointer, world: World, *steps: int) -> None:
    for step in steps:
        ckpt.save(step=step, state=world.state(step), host_state={"at": step})
        finish(ckpt)


def crash(world: World, step: int, **settings: Any) -> None:
    """Let a life begin from ``step`` and end without a save."""
    with crashing(world, **settings) as ckpt:
        assert restored(ckpt, world) == step


def suspects(world: World) -> list[tuple[object, object]]:
    events = [event.fields for event in world.events if event.name == "restore.suspect"]
    return [(each["step"], each["lives"]) for each in events]


@pytest.mark.dear
@pytest.mark.parametrize("settings", [BOTH, STORAGE], ids=["RAM", "storage"])
def test_third_life_that_ends_is_told_by_the_fourth(world: World, settings: dict[str, Any]) -> None:
    with crashing(world, **settings) as ckpt:
        save(ckpt, world, 1, 2, 3, 4)
    for _ in range(3):
        crash(world, 4, **settings)
    assert suspects(world) == []
    crash(world, 4, **settings)
    assert suspects(world) == [(4, 3)]
    (event,) = [event for event in world.events if event.name == "restore.suspect"]
    assert event.fields["text"] == (
        "3 lives in a row ended before a newer save than step 4 was complete; it is restored"
        " again: restore(step=...) goes back further"
    )
    crash(world, 4, **settings)
    assert suspects(world) == [(4, 3), (4, 4)]


@pytest.mark.dear
@pytest.mark.parametrize("settings", [BOTH, STORAGE], ids=["RAM", "storage"])
def test_newer_save_or_an_orderly_end_begins_the_count_anew(
    world: World, settings: dict[str, Any]
) -> None:
    with crashing(world, **settings) as ckpt:
        save(ckpt, world, 1, 2)
    for _ in range(2):
        crash(world, 2, **settings)
    with world.open_both(**settings) as ckpt:
        assert restored(ckpt, world) == 2  # a job that has nothing left to do
    for _ in range(3):
        crash(world, 2, **settings)
    with crashing(world, **settings) as ckpt:
        assert restored(ckpt, world) == 2
        assert suspects(world) == [(2, 3)]
        save(ckpt, world, 3, 4)
    for _ in range(3):
        crash(world, 4, **settings)
    assert suspects(world) == [(2, 3)]


def test_stop_after_an_error_is_no_orderly_end(world: World) -> None:
    with crashing(world, **STORAGE) as ckpt:
        save(ckpt, world, 1)
    for _ in range(3):
        ckpt = world.open_both(**STORAGE)
        with contextlib.suppress(Crash):
            try:
                assert restored(ckpt, world) == 1
                raise Crash
            finally:
                ckpt.stop()
    crash(world, 1, **STORAGE)
    assert suspects(world) == [(1, 3)]


@pytest.mark.dear
def test_older_step_is_restored_on_request(world: World) -> None:
    with crashing(world, **BOTH) as ckpt:
        save(ckpt, world, 1, 2, 3, 4)
    for _ in range(3):
        crash(world, 4, **BOTH)
    with crashing(world, **BOTH) as ckpt:
        assert restored(ckpt, world, 2) == 2
        save(ckpt, world, 3)
    crash(world, 3, **BOTH)
    with world.open_both(**BOTH) as ckpt:
        assert restored(ckpt, world, 4) == 4  # who asks for it gets it


def test_count_that_storage_cannot_record_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crashing(world, **STORAGE) as ckpt:
        save(ckpt, world, 1)

    def refuse(*_: Any) -> None:
        raise PersistentTierError("write", "the step log", "read-only")

    world.lose_ram()
    monkeypatch.setattr(DirectoryWriter, "note_lives", refuse)
    with world.open_both(**STORAGE) as ckpt:
        assert restored(ckpt, world) == 1
        save(ckpt, world, 2)  # training goes on
        assert ckpt.all_steps() == [1, 2]
    (note,) = [event.fields["text"] for event in world.events if event.name == "restore.note"]
    assert str(note).startswith(
        "storage cannot record that 1 life in a row began from step 1: write the step log"
    )


def test_job_that_saves_nothing_is_not_counted(world: World) -> None:
    with crashing(world, **STORAGE) as ckpt:
        save(ckpt, world, 1)
    for _ in range(4):
        crash(world, 1, local_save_every=0, save_every=0)
    assert suspects(world) == []


def test_ls_shows_how_many_lives_began_from_a_step(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with crashing(world, **BOTH) as ckpt:
        save(ckpt, world, 1, 2)
    for _ in range(2):
        crash(world, 2, **BOTH)
    world.lose_ram()
    crash(world, 2, **BOTH)  # storage has not heard of the others
    places = ["--local-dir", str(world.ramdisk), "--dir", str(world.persistent)]
    assert eckpt_here("ls", *places) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2 ")]
    assert [row.split("  ")[-1].strip() for row in rows] == [
        "whole: 1 life in a row began from it"
    ] * 2
