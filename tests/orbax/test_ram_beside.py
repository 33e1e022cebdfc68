"""RAM beside Orbax's own object, at both faces: what RAM adds, and that RAM takes nothing away."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from damage import flip
from orbax_faces import FACES, Position, no_state, state, target
from world import World, same, small_tmpfs

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.config.settings import default_local_dir
from emergency_ckpt.errors import ConfigError, RestoreFailed
from emergency_ckpt.save import Ballot, Vote
from emergency_ckpt.types import SaveId

OTHER_USER = 12345


class EmptyBuffer(Position):
    """A data iterator whose buffer is empty before the first batch, so that it counts as false."""

    def __len__(self) -> int:
        return 0


@pytest.fixture(params=list(FACES))
def face(request: pytest.FixtureRequest, world: World) -> Any:
    """Open a face of this world, whose RAM is ``world.ramdisk`` unless told otherwise."""

    def opened(*, every: int = 1, stores: int = 2, ram: Any = None, **settings: Any) -> Any:
        settings = {"local_save_every": every, "mesh": world.mesh, **settings}
        settings.setdefault("on_event", world.events.append)
        place = ram or world.ramdisk
        return FACES[request.param](world.persistent, stores, ram=place, settings=settings)

    return opened


def given_up(world: World) -> list[str]:
    """The operations in which the RAM tier was given up."""
    return [str(each.fields["operation"]) for each in world.named("ram.off", cause="given_up")]


def check_storage_alone(world: World, face: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A life whose RAM fails saves and restores as Orbax alone, with one warning and one event."""
    with caplog.at_level(logging.WARNING), face() as opened:
        for step in range(4):
            assert opened.save(step, state(world, step)) is (step % 2 == 0)
        opened.wait()
        assert opened.stored() == [0, 2]
        assert opened.latest() == 2
        assert same(opened.load(None, target(world)), state(world, 2))
        opened.reload()
        assert opened.latest() == 2
    assert len(given_up(world)) == 1
    assert sum(line.startswith("ram.off.given_up: ") for line in caplog.messages) == 1


@pytest.mark.parametrize("step", [3.0, 3.9, "3"])
def test_delete_of_what_is_no_step_removes_nothing(face: Any, world: World, step: Any) -> None:
    with face() as opened:
        for number in range(4):
            opened.save(number, state(world, number))
        opened.wait()
        with pytest.raises((FileNotFoundError, TypeError)):  # Orbax's own
            opened.delete(step)
        opened.reload()
        assert (opened.latest(), opened.stored()) == (3, [0, 2])
    assert given_up(world) == []


# RAM never takes storage away.


def test_directory_of_another_user_leaves_storage(
    world: World, face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("a directory is given to another user by root alone")
    world.ramdisk.mkdir(mode=0o700)
    os.chown(world.ramdisk, OTHER_USER, OTHER_USER)
    check_storage_alone(world, face, caplog)
    assert given_up(world) == ["start"]


def test_file_in_place_of_the_ramdisk_leaves_storage(
    world: World, face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.ramdisk.write_text("no directory")
    check_storage_alone(world, face, caplog)
    assert given_up(world) == ["start"]


def test_ramdisk_without_room_leaves_storage(
    world: World, face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As Docker's /dev/shm, of 64 MB, beside a state that is larger."""
    large = np.zeros(1 << 20, np.float32)
    world.more = lambda step: {"large": large + step}
    with small_tmpfs(world.ramdisk, 2 << 20):
        check_storage_alone(world, face, caplog)
    assert given_up(world) == ["save"]


@pytest.mark.parametrize(
    "states",
    [no_state, lambda: {1, 2}, lambda: jax.numpy.arange(3), lambda: [[]] * 1_000_001],
    ids=["raises", "set", "jax", "too large"],
)
def test_iterator_without_a_state_leaves_out_one_step(
    world: World, face: Any, states: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = Position()
    with caplog.at_level(logging.WARNING), face(stores=4) as opened:
        for step in range(2):
            assert opened.save(step, state(world, step), Position(10 + step))
        opened.save(2, state(world, 2), Position(12, states))
        opened.wait()
        assert opened.latest() == 1
        assert opened.save(3, state(world, 3), Position(13))
        opened.wait()
        assert opened.latest() == 3
        assert opened.stored() == [0]
        assert opened.save(5, state(world, 5), Position(15))
        opened.wait()
    assert given_up(world) == []
    reasons = [str(each.fields["reason"]) for each in world.named("save.skipped", cause="unfit")]
    reasons += [str(each.fields["reason"]) for each in world.named("save.incomplete")]
    (reason,) = reasons
    assert "step 2" in reason
    with face() as opened:
        assert opened.latest() == 5
        assert same(opened.load(5, target(world), found), state(world, 5))
    assert found.at == 15


def test_step_left_out_is_voted_against_and_hushes_no_other(
    world: World, face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning about one iterator says nothing of the trees of later steps."""
    votes: list[tuple[int, bool]] = []
    hand_in = Vote.hand_in

    def heard(vote: Vote, save: SaveId, ballot: Ballot) -> None:
        votes.append((save.step, not ballot.refused))
        hand_in(vote, save, ballot)

    monkeypatch.setattr(Vote, "hand_in", heard)
    with face(stores=100) as opened:
        opened.save(0, state(world, 0))
        assert not opened.save(1, state(world, 1), Position(11, no_state))
        world.more = lambda step: {"name": "a text"} if step in (2, 3) else {}
        for step in range(2, 5):
            assert opened.save(step, state(world, step)) is (step == 4)
    reasons = [str(each.fields["reason"]) for each in world.named("save.skipped", cause="unfit")]
    assert ["no state here" in reason for reason in reasons] == [True, False]
    assert votes == [(0, True), (1, False), (2, False), (3, False), (4, True)]


def test_damaged_step_of_ram_leaves_the_older_one_of_storage(world: World, face: Any) -> None:
    with face(stores=2) as opened:
        for step in range(4):
            opened.save(step, state(world, step))
        opened.wait()
    for slot in world.ramdisk.rglob("slot_*.bin"):
        for at in range(0, 4096, 64):
            flip(slot, at)
    with face(stores=2) as opened:
        assert opened.latest() == 3
        assert same(opened.load(None, target(world)), state(world, 2))
        assert opened.latest() == 2
        assert opened.save(3, state(world, 103))
        opened.wait()
        assert opened.latest() == 3
    with face(stores=2) as opened:
        assert same(opened.load(3, target(world)), state(world, 103))


def let_restores_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each restore from RAM end as one whose peers are silent."""

    def fail(*_: object, **__: object) -> None:
        raise RestoreFailed("restore", "step 3", "a peer is silent")

    monkeypatch.setattr(EmergencyCheckpointer, "restore", fail)


def test_restore_that_fails_in_ram_goes_on_from_storage(
    world: World, face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with face(stores=2) as opened:
        for step in range(4):
            opened.save(step, state(world, step))

    let_restores_fail(monkeypatch)
    with face(stores=2) as opened:
        assert opened.latest() == 3
        assert same(opened.load(None, target(world)), state(world, 2))
        assert opened.latest() == 2
        assert not opened.save(3, state(world, 3))
        assert opened.save(4, state(world, 4))
        opened.wait()
        assert opened.stored() == [0, 2, 4]
    assert given_up(world) == ["restore"]


def test_step_in_ram_alone_that_fails_there_is_an_error(
    world: World, face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step than the one that was asked for would be taken for that one."""
    with face(stores=100) as opened:
        for step in range(4):
            opened.save(step, state(world, step))

    let_restores_fail(monkeypatch)
    with face(stores=100) as opened:
        with pytest.raises(RestoreFailed, match="a peer is silent"):
            opened.load(3, target(world))
        assert opened.latest() == 0
        assert same(opened.load(0, target(world)), state(world, 0))


def test_background_failure_of_ram_is_not_raised(world: World, face: Any) -> None:
    """The ramdisk is emptied under the job: saves to RAM fail, and nothing else does."""
    with face(stores=2) as opened:
        opened.save(0, state(world, 0))
        opened.wait()
        world.lose_ram()
        for step in range(1, 5):
            opened.save(step, state(world, step))
            opened.wait()
        assert opened.stored() == [0, 2, 4]


def test_wrong_setting_is_an_error_all_the_same(world: World, face: Any) -> None:
    with pytest.raises(ConfigError, match="local_save_everi"):
        face(local_save_everi=3)
    with pytest.raises(ConfigError, match="stall_timeout_s"):
        face(stall_timeout_s=-1.0)


def test_default_directory_is_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_local_dir({}) == f"/dev/shm/eckpt-{os.geteuid()}"
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert default_local_dir({}) == f"/dev/shm/eckpt-{OTHER_USER}"
    assert default_local_dir({"ECKPT_LOCAL_DIR": "/mnt/ram"}) == "/mnt/ram"


# Which step counts.


def test_storage_that_went_on_without_ram_counts(world: World, face: Any) -> None:
    """Plain Orbax has saved step 2 since, with other values; RAM has step 3 of before."""
    with face(stores=100) as opened:
        for step in range(4):
            opened.save(step, state(world, step))
    kind = type(opened)
    with kind(world.persistent, 2, is_ours=False) as plain:
        assert plain.latest() == 0
        assert plain.save(2, state(world, 102))
        plain.wait()
    with face(stores=100) as opened:
        assert opened.latest() == 2
        assert same(opened.load(None, target(world)), state(world, 102))
        assert opened.save(3, state(world, 103))
        opened.wait()
    with face(stores=100) as opened:
        assert opened.latest() == 3
        assert same(opened.load(3, target(world)), state(world, 103))


@pytest.mark.dear
def test_month_back_and_forth_loses_nothing(world: World, face: Any) -> None:
    """A week with RAM, a week without, and so on: each from the newest step that it can know."""
    with face() as opened:
        kind = type(opened)
    begun: list[int | None] = []
    for week, last in enumerate((15, 33, 48, 57, 63)):
        is_ours = week % 2 == 0
        opened = face(stores=10, every=3) if is_ours else kind(world.persistent, 10, is_ours=False)
        with opened:
            first = opened.latest()
            if first is not None:
                assert same(opened.load(first, target(world)), state(world, first))
            for step in range(0 if first is None else first + 1, last + 1):
                opened.save(step, state(world, step))
            opened.wait()
        begun.append(first)
    # Storage has each tenth step, RAM each third. RAM's 48 counts no more once storage has 50.
    assert begun == [None, 10, 30, 40, 50]
    with face(stores=10, every=3) as opened:
        assert opened.latest() == 63
        assert opened.stored() == [0, 10, 20, 30, 40, 50, 60]


def test_older_step_of_storage_goes_on_from_there_in_one_life(world: World, face: Any) -> None:
    """RAM is at step 5; the loop goes back to step 0, and a crash leaves what it did since."""
    with face(stores=100) as opened:
        for step in range(6):
            opened.save(step, state(world, step))
        opened.wait()
        assert opened.latest() == 5
        assert same(opened.load(0, target(world)), state(world, 0))
        for step in range(1, 3):
            assert opened.save(step, state(world, 100 + step))
        opened.wait()
        assert opened.latest() == 2
    with face(stores=100) as opened:
        assert opened.latest() == 2
        assert same(opened.load(2, target(world)), state(world, 102))


@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted"])
def test_restart_after_a_rollback_takes_the_newest_step(
    world: World, face: Any, deletes: bool
) -> None:
    """Steps of RAM behind the newest of storage count once that one is deleted."""
    with face(stores=5) as opened:
        for step in range(11):
            opened.save(step, state(world, step))
        opened.wait()
        assert same(opened.load(5, target(world)), state(world, 5))
        for step in (6, 7):
            assert opened.save(step, state(world, 100 + step))
        if deletes:
            opened.delete(10)
        opened.wait()
        assert opened.latest() == (7 if deletes else 10)
    with face(stores=5) as opened:
        newest, number = (7, 107) if deletes else (10, 10)
        assert opened.latest() == newest
        assert same(opened.load(None, target(world)), state(world, number))
        assert opened.latest() == newest
        assert same(opened.load(7, target(world)), state(world, 107))
        opened.reload()
        assert opened.latest() == newest


def test_restore_of_an_older_step_alone_loses_nothing(world: World, face: Any) -> None:
    """As an evaluation does."""
    with face(stores=100) as opened:
        for step in range(6):
            opened.save(step, state(world, step))
    with face(stores=100) as opened:
        assert same(opened.load(0, target(world)), state(world, 0))
    with face(stores=100) as opened:
        assert opened.latest() == 5
        assert same(opened.load(None, target(world)), state(world, 5))


def test_deleted_step_does_not_come_back_from_ram(world: World, face: Any) -> None:
    with face(stores=2) as opened:
        for step in range(3):
            opened.save(step, state(world, step))
        opened.wait()
        opened.delete(2)
        assert opened.latest() == 1, "RAM still has the step before"
        assert opened.stored() == [0]
    with face(stores=2) as opened:
        assert opened.latest() == 1


@pytest.mark.parametrize("kind", [Position, EmptyBuffer])
def test_iterator_is_of_the_step_of_the_arrays(world: World, face: Any, kind: Any) -> None:
    with face(stores=100) as opened:
        for step in range(3):
            opened.save(step, state(world, step), kind(10 + step))
        opened.wait()
    found = kind()
    with face(stores=100) as opened:
        assert same(opened.load(2, target(world), found), state(world, 2))
        assert found.at == 12


def test_every_file_of_storage_is_orbaxs(world: World, face: Any) -> None:
    """The folders of storage are those of a life of plain Orbax."""
    with face(stores=2) as opened:
        for step in range(3):
            opened.save(step, state(world, step))
        kind = type(opened)
    ours = files_below(world.persistent)
    world.persistent = world.persistent.with_name("plain")
    with kind(world.persistent, 2, is_ours=False) as plain:
        for step in range(3):
            plain.save(step, state(world, step))
    assert files_below(world.persistent) == ours


def files_below(root: Path) -> set[str]:
    """The files, but for the data files of databases, whose names are random."""
    names = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return {name for name in names if "/d/" not in name}
