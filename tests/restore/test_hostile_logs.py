"""A version of the step log that somebody made up: named, refused, and no path is followed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forgery import write_sealed
from looks import Tree, tree_of
from persistent_steps import complete_steps
from world import STORAGE, World, restored, save_all, storage_lacks

from emergency_ckpt.errors import OtherFormat, PersistentTierError
from emergency_ckpt.storage import PersistentTier

Version = dict[str, Any]


@pytest.fixture
def saved(world: World) -> World:
    """Steps 2 and 4 in storage alone, and a directory beside it that nothing may touch."""
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4)
    world.lose_ram()
    world.events.clear()
    (outside(world) / "4").mkdir(parents=True)
    (outside(world) / "4" / "kept").write_text("of somebody else")
    return world


def outside(world: World) -> Path:
    return world.persistent.with_name("outside")


def add(world: World, change: Callable[[Version], None] = lambda _: None, **fields: Any) -> Path:
    """One more version, changed, after the newest."""
    newest = world.versions()[-1]
    version = json.loads(newest.read_bytes())["version"]
    version["number"] += 1
    change(version)
    path = newest.with_name(f"{int(newest.stem) + 1:012d}.json")
    write_sealed(path, "version", version, **fields)
    return path


def damage_named(world: World) -> list[str]:
    damaged = world.named("persistent.problem", cause="log_damaged")
    return [str(event.fields["reason"]) for event in damaged]


def entry(**fields: Any) -> Callable[[Version], None]:
    """Change the newest entry."""
    return lambda version: version["steps"][-1].update(fields)


def _is_above(version: Version) -> None:
    version["number"] = 10**12


def _has_an_unknown_field(version: Version) -> None:
    version["base"] = version["number"] - 1


CLAIMS: dict[str, Callable[[Version], None]] = {
    "folder outside": entry(folder="../outside/4"),
    "folder of the root": entry(folder="/etc"),
    "incarnation with a path": entry(incarnation="x/../../outside/4"),
    "number of another": _is_above,
    "field of nobody": _has_an_unknown_field,
}
"""One of each way to the files; ``core/test_step_log.py`` has all that a table may not claim."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_version_that_claims_what_cannot_be_is_refused(saved: World, claim: str) -> None:
    """The version before it is used, and the next one mends it; nothing outside is touched."""
    others = tree_of(outside(saved))
    path = add(saved, CLAIMS[claim])
    with saved.open_both(**STORAGE, keep_last_n=3) as ckpt:
        assert ckpt.latest_step() == 4
        _held = saved.restores(4, by=ckpt)
        assert any(path.name in reason for reason in damage_named(saved))
        save_all(ckpt, saved, 5, 6)
        ckpt.steps.remove(5)
    saved.lose_ram()
    assert restored(saved) == 6
    assert complete_steps(str(saved.persistent)) == [4, 6]
    assert tree_of(outside(saved)) == others
    assert sorted(each.name for each in saved.persistent.iterdir()) == ["4", "6", "host_state"]


def test_version_of_a_future_format_is_refused_by_name(saved: World) -> None:
    path = add(saved, format=3, field_of_the_future=True)
    before = stored(saved)
    with pytest.raises(OtherFormat, match=r"newer version of this package.*restore with that"):
        restored(saved)
    assert stored(saved) == before
    path.unlink()
    saved.lose_ram()
    assert restored(saved) == 4


def test_log_of_an_older_format_is_refused_by_name(saved: World) -> None:
    """Its step 4 was rolled back: without the log that step would count by its markers."""
    path = add(saved, entry(state="aside", finite=True), format=1)
    before = stored(saved)
    with pytest.raises(OtherFormat, match=r"an older version of this package.*new directory"):
        restored(saved)
    assert stored(saved) == before
    path.unlink()
    assert restored(saved) == 4


def stored(world: World) -> Tree:
    return tree_of(world.persistent)


def test_version_of_a_future_format_does_not_hinder_ram(world: World) -> None:
    """A save to storage says why it failed, and writes nothing there."""
    with world.open_both() as ckpt:
        save_all(ckpt, world, 1, 2, 3)
    add(world, format=3)
    before = stored(world)
    with storage_lacks(4), world.open_both() as ckpt:
        _held = world.restores(3, by=ckpt)
        assert ckpt.save(step=4, state=world.state(4))
        ckpt.wait_until_finished()
        assert ckpt.failed_saves
    reasons = [e.fields["reason"] for e in world.events if e.name == "persistent.failed"]
    assert any("a newer version of this package wrote it" in reason for reason in reasons)
    assert stored(world) == before


@pytest.mark.parametrize("what", ["another bit", "nothing else"])
def test_version_that_only_claims_a_future_format_is_damaged(saved: World, what: str) -> None:
    path = saved.versions()[-1]
    data = path.read_bytes().replace(b'"format":2', b'"format":3')  # one bit is another
    path.write_bytes(data if what == "another bit" else b'{"format":3}')
    assert restored(saved) == 4
    assert any(path.name in reason for reason in damage_named(saved))


STRAYS = {"one": (10**12 - 1,), "several": (10**12 - 2, 10**12 - 1), "near": (60,)}


@pytest.mark.parametrize("strays", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("rest", ["all", "no hint", "nothing"])
def test_damaged_version_above_a_gap_does_not_count(
    saved: World, strays: tuple[int, ...], rest: str
) -> None:
    """A number that none can follow, for one: saves go on after the newest that has no gap."""
    log = saved.persistent / "host_state" / "log"
    for path in log.iterdir():
        if rest == "nothing" or (rest == "no hint" and path.name == "newest"):
            path.unlink()
    names = [f"{number:012d}.json" for number in strays]
    for name in names:
        (log / name).write_bytes(b"{}")
    with saved.open_both(**STORAGE, keep_last_n=3) as ckpt:
        _held = saved.restores(4, by=ckpt)
        save_all(ckpt, saved, 5, 6)
    named = damage_named(saved)
    assert all(any(f"{name}: not" in reason for reason in named) for name in names)
    assert all("leaves a gap" in reason for reason in named)
    saved.lose_ram()
    assert restored(saved) == 6
    assert complete_steps(str(saved.persistent)) == [4, 5, 6]


def test_damaged_version_counts_once_its_gap_is_closed(saved: World) -> None:
    """It is passed over then, as any damaged one, and the next has a number above it."""
    newest = int(saved.versions()[-1].stem)
    log = saved.persistent / "host_state" / "log"
    (log / f"{newest + 3:012d}.json").write_bytes(b"{}")
    with saved.open_both(**STORAGE) as ckpt:
        save_all(ckpt, saved, *range(5, 12))
    saved.lose_ram()
    assert restored(saved) == 11
    assert PersistentTier(str(saved.persistent)).found.log.read().faults == ()


def test_sound_version_whose_number_leaves_a_gap_counts(saved: World) -> None:
    """As when a user has removed the one before."""
    *_, before, newest = saved.versions()
    before.unlink()
    read = PersistentTier(str(saved.persistent)).found.log.read()
    assert (read.number, read.faults) == (int(newest.stem), ())
    assert restored(saved) == 4


def test_version_of_100_mib_is_not_used(saved: World) -> None:
    path = add(saved)
    with path.open("ab") as file:
        file.truncate(100 << 20)
    assert restored(saved, save_every=0) == 4
    (reason,) = set(damage_named(saved))
    assert path.name in reason
    assert f"larger than {64 << 20} bytes" in reason
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == 4
        save_all(ckpt, saved, 5)
    assert PersistentTier(str(saved.persistent)).found.log.read().faults == ()


def test_log_that_is_a_link_elsewhere_is_read_as_any_folder(saved: World) -> None:
    """As an operator may have put it on another volume."""
    log = saved.persistent / "host_state" / "log"
    elsewhere = saved.persistent.with_name("log-elsewhere")
    log.rename(elsewhere)
    log.symlink_to(elsewhere)
    with saved.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=saved.state(0))[0] == 4
        save_all(ckpt, saved, 5)
    assert log.is_symlink()
    saved.lose_ram()
    assert restored(saved) == 5


@pytest.mark.parametrize("what", ["folder", "device"])
def test_version_that_is_no_file_is_passed_over(saved: World, what: str) -> None:
    newest = saved.versions()[-1]
    path = newest.with_name(f"{int(newest.stem) + 1:012d}.json")
    if what == "folder":
        path.mkdir()
    else:
        path.symlink_to(os.devnull)
    assert restored(saved, save_every=0) == 4
    assert any(path.name in reason for reason in damage_named(saved))


def test_version_whose_path_is_an_error_is_not_passed_over(saved: World) -> None:
    """What it says is not known; it may have rolled steps back."""
    newest = saved.versions()[-1]
    path = newest.with_name(f"{int(newest.stem) + 1:012d}.json")
    path.symlink_to(path)
    before = stored(saved)
    with pytest.raises(PersistentTierError, match=r"symbolic links"):
        restored(saved)
    assert stored(saved) == before
