"""Directories under other names, steps that are links, and errors about a path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from damage import flip
from looks import eckpt_json
from world import STORAGE, World, logged, persist, restored, save_all, small_tmpfs

from emergency_ckpt.config import run_id_of
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.events import Event


def plain_steps(world: World) -> list[int]:
    """The steps that plain Orbax sees."""
    return sorted(ocp.utils.checkpoint_steps(world.persistent))


def by_link(path: Path) -> str:
    link = path.with_name("link")
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


SPELLINGS: dict[str, Callable[[Path], str]] = {
    "link": by_link,
    "dots": lambda path: f"{path.parent}/elsewhere/../{path.name}",
    "slashes": lambda path: f"{path.parent}//{path.name}/",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_storage_by_another_spelling_is_one_directory(world: World, spelling: str) -> None:
    world.persistent.mkdir(parents=True)
    spelled = SPELLINGS[spelling](world.persistent)
    persist(world, 2, 4, dir=spelled)
    world.lose_ram()
    assert restored(world) == 4
    persist(world, 6, start=4)
    world.lose_ram()
    assert restored(world, dir=spelled) == 6
    assert plain_steps(world) == [2, 4, 6]
    assert not list(world.persistent.glob("*.rolled-back-*"))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ramdisk_by_another_spelling_is_one_directory(world: World, spelling: str) -> None:
    world.ramdisk.mkdir(parents=True)
    spelled = SPELLINGS[spelling](world.ramdisk)
    with world.open(local_dir=spelled) as ckpt:
        save_all(ckpt, world, 3)
    for local_dir in (str(world.ramdisk), spelled):
        with world.open(local_dir=local_dir) as ckpt:
            world.restores(3, by=ckpt)
    assert [path.name for path in world.ramdisk.glob("run/process_*")] == ["process_00000"]


@pytest.mark.parametrize(
    "name", ["4", "4/_CHECKPOINT_METADATA", "host_state/4", "host_state/4/marker.json"]
)
def test_error_about_a_path_takes_no_older_step(world: World, name: str) -> None:
    """It says nothing about the step. Here a name leads to itself (ELOOP)."""
    persist(world, 2, 4)
    world.lose_ram()
    path = world.persistent / name
    away = world.persistent.with_name("away")
    path.rename(away)
    path.symlink_to(path)
    with pytest.raises(PersistentTierError, match="symbolic links"):
        restored(world)
    path.unlink()
    away.rename(path)
    assert restored(world) == 4
    assert not list(world.persistent.glob("*.rolled-back-*"))


@pytest.mark.parametrize("comes_back", [True, False])
def test_damage_in_ram_beside_unlisted_storage(world: World, *, comes_back: bool) -> None:
    """Storage was first asked only briefly, as RAM seemed to have the newest step too."""
    with world.open_both(local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 2, 4)
    newest = max(world.ramdisk.rglob("slot_*.manifest.json"), key=lambda x: x.stat().st_mtime_ns)
    flip(newest.with_name(newest.name.replace("manifest.json", "bin")), 0)
    path, away = world.persistent, world.persistent.with_name("away")

    def come_back(event: Event) -> None:
        world.events.append(event)
        if comes_back and event.name == "restore.stage" and event.fields["stage"] == "replanned":
            path.unlink()
            away.rename(path)

    with world.open_both(local_keep_last_n=2, on_event=come_back) as ckpt:
        path.rename(away)
        path.symlink_to(path)
        if comes_back:
            world.restores(4, by=ckpt)
            return
        with pytest.raises(PersistentTierError, match="symbolic links"):
            ckpt.restore(state=world.state(0))
        path.unlink()
        away.rename(path)


def linked_step(world: World, step: int, *, documents: bool = True) -> list[Path]:
    """Move a step elsewhere, with links in its place; return where it is now."""
    places: list[Path] = []
    for folder in ("", "host_state") if documents else ("",):
        path = world.persistent / folder / str(step)
        place = world.persistent.with_name(f"elsewhere{folder}") / str(step)
        place.parent.mkdir(exist_ok=True)
        shutil.move(path, place)
        path.symlink_to(place)
        places.append(place)
    return places


def files(*places: Path) -> dict[str, bytes]:
    found = [each for place in places for each in place.rglob("*") if each.is_file()]
    return {str(path): path.read_bytes() for path in found}


def test_step_that_is_a_link_is_listed_and_restored(world: World) -> None:
    persist(world, 2, 4)
    linked_step(world, 4)
    world.lose_ram()
    status, listed = eckpt_json("ls", "--dir", world.persistent)
    assert status == 0
    assert sorted(each["step"] for each in listed["steps"]) == [2, 4]
    assert plain_steps(world) == [2, 4]
    assert restored(world) == 4


@pytest.mark.parametrize("documents", [True, False], ids=["both folders", "tensors"])
@pytest.mark.parametrize("how", ["remove", "retention", "rollback", "saved again"])
def test_removal_of_a_link_touches_nothing_behind_it(
    world: World, how: str, *, documents: bool
) -> None:
    persist(world, 2, 4)
    places = linked_step(world, 4, documents=documents)
    before = files(*places)
    assert before
    world.lose_ram()
    match how:
        case "remove":
            with world.open_both(**STORAGE) as ckpt:
                ckpt.steps.remove(4)
        case "retention":
            persist(world, 6, 8, start=4, keep_last_n=1)
        case "rollback":
            persist(world, 3, start=2)
        case _:
            persist(world, 4, start=2)
    assert files(*places) == before
    world.lose_ram()
    newest = {"remove": 2, "retention": 8, "rollback": 3, "saved again": 4}[how]
    assert plain_steps(world)[-1] == newest
    assert restored(world) == newest


def test_removal_that_never_succeeds_is_said_once(world: World) -> None:
    """A step that is a mount point cannot be renamed; saves go on without a wait for it."""
    settings: dict[str, Any] = {"keep_last_n": 1, "total_timeout_s": 3600.0}
    persist(world, 2, **settings)
    (step,) = linked_step(world, 2, documents=False)
    (world.persistent / "2").unlink()
    with small_tmpfs(world.persistent / "2", 1 << 20):
        shutil.copytree(step, world.persistent / "2", dirs_exist_ok=True)
        with logged() as lines, world.open_both(**{**STORAGE, **settings}) as ckpt:
            ckpt.restore(state=world.state(0))
            for step in (4, 6):
                assert ckpt.save(step=step, state=world.state(step), host_state={"at": step})
                ckpt.wait_until_finished()
            ckpt.check_for_errors()
    said = [line for line in lines if "Device or resource busy" in line]
    events = [line for line in said if line.startswith("persistent.removal.failed: ")]
    assert (len(events), len(said)) == (1, 1), "the event's warning, once"
    assert plain_steps(world)[-1] == 6
    world.lose_ram()
    assert restored(world) == 6


@pytest.mark.parametrize("name", ["state_4", "000004"])
def test_removal_takes_a_step_under_the_name_plain_orbax_gave(world: World, name: str) -> None:
    prefix = "state" if name.startswith("state") else None
    options = ocp.CheckpointManagerOptions(
        step_prefix=prefix, step_format_fixed_length=None if prefix else 6
    )
    with ocp.CheckpointManager(world.persistent, options=options) as manager:
        for step in (2, 4):
            manager.save(step, args=ocp.args.StandardSave({"w": world.state(step)["w"]}))
    with world.open_both(**STORAGE) as ckpt:
        ckpt.steps.remove(4)
        assert ckpt.latest_step() == 2
    assert not (world.persistent / name).exists()
    with ocp.CheckpointManager(world.persistent, options=options) as manager:
        assert manager.all_steps() == [2]


def test_moved_directory_names_the_run_whose_ram_does_not_count(world: World) -> None:
    """The run is named after the path: its RAM is found under the name that the log has."""
    settings: dict[str, Any] = {"run_id": None, "save_every": 5, "local_save_every": 1}
    with world.open_both(**settings) as ckpt:
        save_all(ckpt, world, 5, 8)
    name = run_id_of(str(world.persistent))
    world.persistent = world.persistent.rename(world.persistent.with_name("moved"))
    world.events.clear()
    with world.open_both(**settings) as ckpt:
        told = [e.fields["text"] for e in world.named("warning", cause="setting")]
        assert [f"set run_id={name!r}" in str(text) for text in told].count(True) == 1, told
        assert world.restores(5, by=ckpt) is not None
    world.events.clear()
    with world.open_both(**{**settings, "run_id": name}) as ckpt:
        assert world.restores(8, by=ckpt) is not None
        assert not [e for e in world.events if "had another path" in str(e.fields.get("text"))]
