"""A file server may list a folder as it was half a minute ago; a look-up by name is current."""

from __future__ import annotations

from pathlib import Path

import pytest
from persistent_steps import KEPT, LOG_FOLDER, complete_steps
from world import STORAGE, World, finish, save_all

from emergency_ckpt.core.step_log import Table
from emergency_ckpt.storage import StepLog, StorageDirectory

LIFE = "000000000002-0000000000000000"


class LateListings:
    """Once ``freeze`` was called, every folder is listed as it was then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._names_in = StorageDirectory.names_in
        self._old: dict[str, set[str]] = {}
        late = self

        def names_in(
            own: StorageDirectory, below: str = "", deadline_s: float | None = None
        ) -> set[str]:
            return late._old.get(below) or late._names_in(own, below, deadline_s)

        patch.setattr(StorageDirectory, "names_in", names_in)

    def freeze(self, world: World) -> None:
        storage = StorageDirectory(str(world.persistent), 60.0)
        folders = ("", "host_state", "host_state/log")
        self._old = {folder: self._names_in(storage, folder) for folder in folders}

    def thaw(self) -> None:
        self._old = {}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateListings:
    return LateListings(monkeypatch)


@pytest.mark.parametrize("saves", [1, KEPT])
def test_start_beside_late_listings_takes_the_newest_step(
    world: World, late: LateListings, saves: int
) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 1, 2)
        late.freeze(world)
        newest = 2 + saves
        save_all(ckpt, world, *range(3, newest + 1))
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.all_steps() == list(range(1, newest + 1))
        assert ckpt.restore(state=world.state(0))[0] == newest
        save_all(ckpt, world, newest + 1)
    late.thaw()
    assert complete_steps(str(world.persistent)) == list(range(1, newest + 2))
    assert not world.named("persistent.removal", stage="missing")


def test_step_removed_beside_late_listings_stays_away(world: World, late: LateListings) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 1, 2, 3)
        late.freeze(world)
        ckpt.steps.remove(3)
        ckpt.steps.remove(1)
        assert ckpt.all_steps() == [2]
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
        assert ckpt.all_steps() == [2, 3]
    late.thaw()
    assert complete_steps(str(world.persistent)) == [2, 3]


def test_step_saved_again_beside_late_listings_is_the_new_one(
    world: World, late: LateListings
) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 1, 2)
    late.freeze(world)
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(1, state=world.state(0))[0] == 1
        ckpt.save(step=2, state=world.state(102))
        finish(ckpt)
    world.lose_ram()
    with world.open_both(**STORAGE) as ckpt:
        step, state = ckpt.restore(state=world.state(0))
        assert (step, int(state["step"])) == (2, 102)
        save_all(ckpt, world, 3)
    late.thaw()
    assert complete_steps(str(world.persistent)) == [1, 2, 3]


def test_late_writer_of_a_removed_version_leaves_no_hint(tmp_path: Path) -> None:
    """Its create succeeds, for the version of that number has long been removed."""
    log = StepLog(StorageDirectory(str(tmp_path), 60.0))
    read = log.append(Table(1, "run", False, LIFE))
    assert read is not None
    for number in range(2, 3 * KEPT):
        read, after = log.append(Table(number, "run", False, LIFE)), read
        assert read is not None
        log.remove_old(read, after)
    assert log.append(Table(2, "run", False, LIFE, "late")) is None
    assert (tmp_path / LOG_FOLDER / "newest").read_text() == str(read.number)
    assert log.read().number == read.number
