"""Rolled-back steps do not come back: in either tier, from any host, after any restart."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pytest
from faults import call_fails
from persistent_steps import complete_steps
from trees import tree_of
from world import STORAGE, World, logged, persist, restored, same, save_all

from emergency_ckpt.errors import Unrecoverable
from emergency_ckpt.storage import DirectoryWriter


def kept(world: World) -> list[str]:
    return sorted(path.name.split("-")[0] for path in world.persistent.glob("*.rolled-back-*"))


def test_restore_of_an_older_step_alone_changes_nothing(world: World) -> None:
    """An evaluation looks at a step, and the job goes on from its newest."""
    persist(world, 2, 4, 6)
    before = tree_of(world.persistent)
    with world.open_both(save_every=0) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
        assert ckpt.latest_step() == 6
    assert tree_of(world.persistent) == before
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
    assert kept(world) == []
    assert complete_steps(str(world.persistent)) == [2, 4, 6]
    assert restored(world) == 6
    world.lose_ram()
    assert restored(world) == 6


@pytest.mark.parametrize("tier", ["ram", "storage"])
def test_first_save_after_it_is_binding_in_both_tiers(world: World, tier: str) -> None:
    persist(world, 2, 4, 6)
    every = {"save_every": 3} if tier == "storage" else {"save_every": 50}
    with world.open_both(local_save_every=1, **every) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
        assert ckpt.latest_step() == 3
    assert kept(world) == ["4.rolled", "6.rolled"]
    assert restored(world, **every) == 3
    world.lose_ram()
    assert restored(world, **every) == (3 if tier == "storage" else 2)


def test_forced_save_of_the_restored_step_is_binding_in_storage(world: World) -> None:
    """Both tiers have the step, so that no save begins."""
    persist(world, 2, 4, 6)
    world.lose_ram()
    with world.open_both(local_save_every=1, save_every=50) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
        assert not ckpt.save(step=2, state=world.state(2), force=True)
    assert kept(world) == ["4.rolled", "6.rolled"]
    world.lose_ram()
    assert restored(world) == 2


def test_job_that_saves_to_storage_alone_keeps_no_state_in_ram(world: World) -> None:
    for step in (2, 4, 6):
        with world.open_both(**STORAGE) as ckpt:
            assert ckpt.restore(state=world.state(0))[0] == (step - 2 or None)
            save_all(ckpt, world, step)
        assert list(world.ramdisk.rglob("slot_*")) == []
    assert "ram.off" not in world.names()


def test_steps_of_the_new_timeline_are_kept_by_retention(world: World) -> None:
    persist(world, 2, 4, 6)
    with world.open_both(**STORAGE, keep_last_n=2) as ckpt:
        ckpt.restore(2, state=world.state(0))
        save_all(ckpt, world, 3, 4, 5)
        assert complete_steps(str(world.persistent)) == [4, 5]
    world.lose_ram()
    assert restored(world) == 5
    assert kept(world) == ["6.rolled"], "the old step 4 made room for the new one"


def test_restore_of_newest_leaves_storage_alone_until_a_save(world: World) -> None:
    """A newer step that could not be read may be whole again."""
    persist(world, 2, 4)
    marker = world.persistent / "host_state" / "4" / "marker.json"
    whole = marker.read_bytes()
    marker.write_bytes(b"{")
    assert restored(world) == 2
    world.lose_ram()
    marker.write_bytes(whole)
    assert restored(world) == 4
    world.lose_ram()
    marker.write_bytes(b"{")
    with world.open_both(**STORAGE, keep_last_n=1) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
    world.lose_ram()
    assert kept(world) == ["4.rolled"]
    assert restored(world) == 3


def test_listed_save_is_complete_though_hiding_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save hides the step."""
    persist(world, 2, 4)
    world.lose_ram()
    (world.persistent / "host_state" / "4" / "marker.json").write_bytes(b"{")
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        with monkeypatch.context() as patch:
            call_fails(patch, DirectoryWriter, "settle")
            save_all(ckpt, world, 3)
        assert world.named("persistent.complete", step=3)
        assert kept(world) == []
        save_all(ckpt, world, 5)
    assert kept(world) == ["4.rolled"]


def test_host_away_learns_that_its_steps_were_rolled_back(world: World) -> None:
    """Its RAM has step 10 of the old life; storage has the new one's step 8, and the record."""
    both = {"save_every": 2}
    with world.open_both(**both) as ckpt:
        save_all(ckpt, world, *range(1, 11))
    away = Path(f"{world.ramdisk}.away")
    shutil.copytree(world.ramdisk, away)
    with world.open_both(**both) as ckpt:
        ckpt.restore(4, state=world.state(0))
        save_all(ckpt, world, 6, 8)
    world.lose_ram()
    away.rename(world.ramdisk)
    world.events.clear()
    with logged() as lines:
        world.restores(8, **both)
    reasons = [e.fields["reason"] for e in world.events if e.name == "restore.rejected"]
    assert any("rolled back: incarnation" in reason for reason in reasons)
    # Nothing is lost that the job has not left itself.
    assert not any("newer steps are passed over" in line for line in lines)


def test_ram_of_the_rolled_back_life_alone_is_no_way_back(world: World) -> None:
    """But for who asks for it by its number."""
    with world.open() as ckpt:
        save_all(ckpt, world, 1, 2)
    away = Path(f"{world.ramdisk}.away")
    shutil.copytree(world.ramdisk, away)
    with world.open(local_keep_last_n=2) as ckpt:
        ckpt.restore(1, state=world.state(0))
        save_all(ckpt, world, 2)
    (record,) = world.ramdisk.glob("*/*/ledger.json")
    (place,) = away.glob("*/process_*")
    shutil.copy(record, place)
    for manifest in place.glob("slot_*.manifest.json"):
        if '"step":1}' in manifest.read_text():
            manifest.unlink()
    world.lose_ram()
    away.rename(world.ramdisk)
    with world.open() as ckpt:
        with pytest.raises(Unrecoverable, match=r"step 2 .* rolled back"):
            ckpt.restore(state=world.state(0))
        assert ckpt.restore(2, state=world.state(0))[0] == 2


def test_storage_that_was_away_follows_at_the_next_save(world: World) -> None:
    persist(world, 2, 4)
    before = Path(f"{world.persistent}.before")
    shutil.copytree(world.persistent, before)
    with world.open_both(local_save_every=1, save_every=1) as ckpt:
        ckpt.restore(2, state=world.state(0))  # it lies in RAM now
    shutil.rmtree(world.persistent)
    before.rename(world.persistent)  # as if storage had never heard of it
    elsewhere = world.persistent.rename(f"{world.persistent}.elsewhere")
    with world.open_both(save_every=10) as ckpt:
        assert ckpt.restore(2, state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
    shutil.rmtree(world.persistent)
    elsewhere.rename(world.persistent)
    assert kept(world) == []
    with world.open_both(save_every=1) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 3
        save_all(ckpt, world, 5)
    assert kept(world) == ["4.rolled"]
    world.lose_ram()
    assert restored(world) == 5


def kept_paths(world: World) -> list[str]:
    return [path.name for path in world.persistent.glob("*.rolled-back-*")]


def test_rolled_back_step_can_be_asked_for(world: World) -> None:
    persist(world, 2, 4)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(2, state=world.state(0))
        save_all(ckpt, world, 3)
    (name,) = kept_paths(world)
    world.lose_ram()
    assert restored(world, 4) == 4
    (world.persistent / name).rename(world.persistent / "4")
    world.lose_ram()
    assert restored(world) == 3  # by itself it does not come back
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(4, state=world.state(0))[0] == 4
        save_all(ckpt, world, 5)
    world.lose_ram()
    assert restored(world) == 5  # from then on the job went on from there
    assert restored(world, 4) == 4


def test_job_that_does_not_save_moves_nothing_in_storage(world: World) -> None:
    """It may read what another one is writing."""
    persist(world, 2, 4)
    world.lose_ram()
    assert restored(world, 2, save_every=0) == 2
    assert kept(world) == []


def test_damaged_newest_step_does_not_count_for_retention(world: World) -> None:
    """The good one that is saved after it must not go in its place."""
    persist(world, 2, 4)
    world.lose_ram()
    for path in (world.persistent / "4" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with world.open_both(**STORAGE, keep_last_n=1) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] == 2
        save_all(ckpt, world, 3)
    world.lose_ram()
    assert restored(world) == 3
    assert kept(world) == ["4.rolled"]


@pytest.mark.parametrize("greater", ["first", "second"])
def test_of_two_lives_apart_that_came_further_is_restored(
    world: World, monkeypatch: pytest.MonkeyPatch, greater: str
) -> None:
    """Neither could know of the other; both have one number, and names that say nothing."""
    real = secrets.token_hex

    def live(*steps: int, name: str) -> int | None:
        digit = "f" if name == greater else "0"
        monkeypatch.setattr(secrets, "token_hex", lambda n: digit + real(n)[1:])
        with world.open() as ckpt:
            found, state = ckpt.restore(state=world.state(0))
            assert found is None or same(state, world.state(found))
            save_all(ckpt, world, *steps)
        return found

    live(1, 2, name="second")
    before, apart = (Path(f"{world.ramdisk}.{name}") for name in ("before", "apart"))
    shutil.copytree(world.ramdisk, before)
    assert live(3, 4, 5, name="first") == 2
    world.ramdisk.rename(apart)
    before.rename(world.ramdisk)
    assert live(3, name="second") == 2
    (place,) = apart.glob("*/process_*")
    place.rename(world.ramdisk / "run" / "process_00009")
    assert live(6, name="third") == 5
    assert live(name="fourth") == 6
