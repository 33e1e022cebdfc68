"""Directories of plain Orbax, copied by hand, without their log: what is whole is restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import world as world_of_tests
from looks import eckpt
from persistent_steps import complete_steps
from world import STORAGE, World, finish, save_all

from emergency_ckpt.errors import DirectoryInUse, ForeignStep, StepNotFound, Unrecoverable

LIKE = {"w": np.zeros(4, np.float32)}


def persist(world: World, *steps: int, **settings: Any) -> None:
    world_of_tests.persist(world, *steps, **settings)
    world.lose_ram()


def restored(world: World, step: int | None = None, **settings: Any) -> int | None:
    world.events.clear()
    found = world_of_tests.restored(world, step, **settings)
    world.lose_ram()
    return found


def copy_steps(world: World, to: Path, *steps: int) -> None:
    """With both folders of each, as ``cp -r``."""
    for step in steps:
        for folder in ("", "host_state"):
            shutil.copytree(world.persistent / folder / str(step), to / folder / str(step))


def log_of(world: World) -> Path:
    return world.persistent / "host_state" / "log"


def plain(directory: Path, step: int, prefix: str | None = None) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix=prefix)
    with ocp.CheckpointManager(directory, options=options) as manager:
        state = {"w": np.full(4, step, np.float32)}
        manager.save(step, args=ocp.args.StandardSave(state))


def plain_restored(world: World, **settings: Any) -> int | None:
    """Restore a state that both kinds of step may have."""
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        found, state = ckpt.restore(state=LIKE)
        assert found is None or state["w"].tolist() == [found] * 4
    world.lose_ram()
    return found


def save_plain_like(world: World, step: int) -> None:
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=LIKE)
        assert ckpt.save(step=step, state={"w": np.full(4, step, np.float32)})
        finish(ckpt)
    world.lose_ram()


def test_directory_of_plain_orbax_is_gone_on_from(world: World) -> None:
    for step in (2, 4):
        plain(world.persistent, step)
    assert plain_restored(world, save_every=0) == 4
    assert not log_of(world).exists(), "who only reads writes nothing"
    save_plain_like(world, 5)
    assert complete_steps(str(world.persistent)) == [2, 4, 5]
    assert plain_restored(world) == 5
    with ocp.CheckpointManager(world.persistent) as manager:
        assert manager.all_steps() == [2, 4, 5]


@pytest.mark.dear
def test_folders_of_plain_orbax_renamed_by_hand_are_found(world: World) -> None:
    """After they were listed under their names before."""
    for step in (2, 4):
        plain(world.persistent, step, "state")
    save_plain_like(world, 5)
    for step in (2, 4):
        (world.persistent / f"state_{step}").rename(world.persistent / str(step))
    shutil.rmtree(world.persistent / "5")
    with pytest.raises(ForeignStep, match=r"step 4: another program wrote it"):
        plain_restored(world, save_every=0)
    assert eckpt("doctor", "--adopt", "--dir", world.persistent).returncode == 0
    assert plain_restored(world, save_every=0) == 4
    save_plain_like(world, 10)
    assert plain_restored(world) == 10


@pytest.mark.dear
def test_directory_copied_whole_is_as_the_first(world: World) -> None:
    persist(world, 2, 4, 6)
    persist(world, 5, start=4)
    first, world.persistent = world.persistent, world.persistent.with_name("copy")
    shutil.copytree(first, world.persistent)
    shutil.rmtree(first)
    assert complete_steps(str(world.persistent)) == [2, 4, 5]
    persist(world, 7, start=5)
    assert restored(world) == 7
    assert restored(world, 6) == 6


@pytest.mark.dear
def test_directory_copied_before_later_saves_goes_on_alone(world: World) -> None:
    """``newest`` of the log and the number of the life are those of the copy."""
    persist(world, 2)
    copy = world.persistent.with_name("copy")
    shutil.copytree(world.persistent, copy)
    persist(world, *range(3, 20), start=2, keep_last_n=2)
    first, world.persistent = world.persistent, copy
    persist(world, 3, 4, start=2)
    assert restored(world) == 4
    world.persistent = first
    assert restored(world) == 19


def test_steps_copied_alone_count_in_another_directory(world: World) -> None:
    persist(world, 2, 4, 6)
    other = world.persistent.with_name("other")
    copy_steps(world, other, 2, 6)
    world.persistent = other
    assert restored(world, save_every=0) == 6
    assert not log_of(world).exists()
    with world.open_both(**STORAGE) as ckpt:
        position = {"at": 0}
        assert ckpt.restore(state=world.state(0), host_state=position)[0] == 6
        assert position == {"at": 6}
        save_all(ckpt, world, 7)
    world.lose_ram()
    assert complete_steps(str(other)) == [2, 6, 7]
    assert restored(world) == 7


@pytest.mark.dear
def test_step_copied_into_a_used_directory_is_taken(world: World) -> None:
    """A newer one, where the chain allows it. What the job did not come from is left behind."""
    persist(world, 2, 4, 6)
    other = world.persistent.with_name("other")
    first, world.persistent = world.persistent, other
    persist(world, 3)
    world.persistent = first
    copy_steps(world, other, 6)
    world.persistent = other
    assert restored(world) == 6
    persist(world, 7, start=6)
    assert complete_steps(str(other)) == [6, 7]
    assert restored(world, 3) == 3


def test_step_copied_back_after_a_rollback_does_not_count(world: World) -> None:
    persist(world, 2, 4)
    kept = world.persistent.with_name("kept")
    copy_steps(world, kept, 4)
    persist(world, 3, start=2)
    for folder in ("", "host_state"):
        target = world.persistent / folder / "4"
        shutil.copytree(kept / folder / "4", target, dirs_exist_ok=True)
    assert restored(world) == 3
    assert restored(world, 4) == 4


def test_tensors_copied_without_documents_are_plain(world: World) -> None:
    persist(world, 2)
    other = world.persistent.with_name("other")
    shutil.copytree(world.persistent / "2", other / "2")
    world.persistent = other
    with world.open_both(**STORAGE) as ckpt:
        like = {name: leaf for name, leaf in world.state(0).items() if name != "empty"}
        assert ckpt.restore(state=like)[0] == 2


@pytest.mark.parametrize("has_log", [True, False])
def test_traces_of_steps_without_any_step_are_named(world: World, has_log: bool) -> None:
    """RAM wiped, the tensors deleted by a stranger, the markers left."""
    persist(world, 2, 4)
    for step in (2, 4):
        shutil.rmtree(world.persistent / str(step))
    if not has_log:
        shutil.rmtree(log_of(world))
    with pytest.raises(Unrecoverable) as failed:
        restored(world)
    for step in (2, 4):
        assert f"step {step}, persistent tier: its tensors are gone" in str(failed.value)


def test_all_steps_deleted_with_their_documents_are_named(world: World) -> None:
    """The log still lists them."""
    persist(world, 2, 4)
    for step in ("2", "4", "host_state/2", "host_state/4"):
        shutil.rmtree(world.persistent / step)
    with pytest.raises(Unrecoverable, match=r"step 4, persistent tier: its tensors are gone"):
        restored(world)


@pytest.mark.parametrize("lost", ["log", "log and RAM"])
def test_log_lost_is_said_and_no_fresh_start(world: World, lost: str) -> None:
    with world.open_both(**STORAGE) as ckpt:
        save_all(ckpt, world, 2, 4)
    if "RAM" in lost:
        world.lose_ram()
    shutil.rmtree(log_of(world))
    assert restored(world, save_every=0) == 4
    assert world.named("persistent.problem", cause="log_missing")
    persist(world, 5, start=4)
    assert complete_steps(str(world.persistent)) == [2, 4, 5]
    assert restored(world) == 5
    assert not any(e.point.startswith("persistent.problem.log_") for e in world.events)


def test_steps_copied_alone_may_begin_another_run(world: World) -> None:
    persist(world, 2)
    other = world.persistent.with_name("other")
    copy_steps(world, other, 2)
    first, world.persistent = world.persistent, other
    persist(world, 3, start=2, run_id="other")
    assert restored(world, run_id="other") == 3
    with pytest.raises(DirectoryInUse, match="run 'other' saves there"):
        restored(world)
    world.persistent = first
    assert restored(world) == 2


def test_step_deleted_by_a_stranger_is_dropped_and_named(world: World) -> None:
    persist(world, 2, 4, 6)
    shutil.rmtree(world.persistent / "6")
    assert restored(world) == 4
    world.events.clear()
    persist(world, 7, start=4)
    missing = world.named("persistent.removal", stage="missing")
    dropped = [event.fields["step"] for event in missing]
    assert dropped == [6]
    assert complete_steps(str(world.persistent)) == [2, 4, 7]
    with pytest.raises(StepNotFound, match="storage has"):
        restored(world, 6)
