"""Steps that another program writes beside the step log: passed by, refused, or adopted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from faults import call_fails, storage_fails
from looks import eckpt, eckpt_json
from persistent_steps import complete_steps
from world import STORAGE, World, finish

from emergency_ckpt.errors import ForeignStep, PersistentTierError, SaveFailed
from emergency_ckpt.storage.directory_writer import DirectoryWriter
from emergency_ckpt.storage.pinned import Pinned
from emergency_ckpt.storage.steps import StoredSteps

LIKE = {"w": np.zeros(4, np.float32)}


def plain(directory: Path, *steps: int, value: float | None = None) -> None:
    """Write ``steps`` with Orbax alone, in place of what is there."""
    with ocp.CheckpointManager(directory) as manager:
        for step in steps:
            if step in manager.all_steps():
                manager.delete(step)
            state = {"w": np.full(4, step if value is None else value, np.float32)}
            assert manager.save(step, args=ocp.args.StandardSave(state), force=True)


def save(world: World, *steps: int) -> None:
    """Go on from the newest step."""
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(state=LIKE)
        for step in steps:
            assert ckpt.save(step=step, state={"w": np.full(4, step, np.float32)})
            finish(ckpt)
    world.lose_ram()


def restored(world: World, step: int | None = None, **settings: int) -> tuple[int | None, float]:
    with world.open_both(**{**STORAGE, **settings}) as ckpt:
        found, state = ckpt.restore(step, state=LIKE)
    world.lose_ram()
    return found, float(state["w"][0])


def adopted(world: World) -> list[str]:
    done = eckpt("doctor", "--adopt", "--dir", world.persistent)
    assert done.returncode == 0, done
    return [line.split("  ")[0] for line in done.stdout.splitlines()]


def test_log_without_steps_takes_in_what_is_there(world: World) -> None:
    """A start puts itself on record, and its job ends before a save: Orbax goes on meanwhile."""
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(state=LIKE)[0] is None
    plain(world.persistent, 2, 4)
    assert adopted(world) == []
    assert restored(world) == (4, 4.0)
    save(world, 5)
    assert complete_steps(str(world.persistent)) == [2, 4, 5]
    assert restored(world, 2) == (2, 2.0)


@pytest.mark.parametrize("is_refused", [False, True])
def test_removal_before_a_first_save_leaves_no_step_foreign(
    world: World, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Also where the files cannot be deleted, so that the log has the step on its way out."""
    plain(world.persistent, 2, 4, 6)
    with world.open_both(**STORAGE) as ckpt, monkeypatch.context() as patch:
        ckpt.restore(state=LIKE)
        if is_refused:
            call_fails(patch, Pinned, "move")
            with pytest.raises(PersistentTierError):
                ckpt.steps.remove(2)
        else:
            ckpt.steps.remove(2)
    world.lose_ram()
    assert restored(world) == (6, 6.0)
    save(world, 7)
    assert complete_steps(str(world.persistent)) == [4, 6, 7]
    assert not (world.persistent / "2").exists()


def test_newer_step_of_another_program_ends_a_restore(world: World) -> None:
    plain(world.persistent, 2)
    save(world, 4)
    plain(world.persistent, 6, 8)
    for wanted in (None, 8, 6):
        with pytest.raises(ForeignStep, match=f"step {wanted or 8}: .*eckpt doctor --adopt"):
            restored(world, wanted)
    assert restored(world, 4, save_every=0) == (4, 4.0)
    assert adopted(world) == ["step 6", "step 8"]
    assert adopted(world) == []
    assert restored(world) == (8, 8.0)
    save(world, 9)
    assert complete_steps(str(world.persistent)) == [2, 4, 6, 8, 9]


def test_older_step_of_another_program_is_passed_by_and_kept(world: World) -> None:
    save(world, 2, 5)
    plain(world.persistent, 3)
    save(world, 6)
    assert complete_steps(str(world.persistent)) == [2, 5, 6]
    assert restored(world) == (6, 6.0)
    with world.open_both(**STORAGE) as ckpt:
        ckpt.restore(2, state=LIKE)
        assert ckpt.save(step=3, state={"w": np.full(4, 30, np.float32)})
        with pytest.raises(SaveFailed, match="does not name"):
            finish(ckpt)
    world.lose_ram()
    with ocp.CheckpointManager(world.persistent) as manager:
        found = manager.restore(3, args=ocp.args.StandardRestore(LIKE))
    assert found["w"].tolist() == [3.0] * 4


def test_tensors_of_ours_without_documents_are_passed_by(world: World) -> None:
    """As of a life that hung in a save, and wrote on when a newer one had cleared its documents."""
    save(world, 2, 4)
    shutil.copytree(world.persistent / "4", world.persistent / "6")
    assert restored(world) == (4, 4.0)
    assert adopted(world) == []
    save(world, 8)
    assert complete_steps(str(world.persistent)) == [2, 4, 8]


def test_ram_that_is_newer_needs_no_adoption(world: World) -> None:
    with world.open_both(save_every=2, local_save_every=1) as ckpt:
        for step in (2, 5):
            assert ckpt.save(step=step, state={"w": np.full(4, step, np.float32)})
            finish(ckpt)
    assert complete_steps(str(world.persistent)) == [2]
    plain(world.persistent, 4)
    with world.open_both() as ckpt:
        assert ckpt.restore(state=LIKE)[0] == 5
    world.lose_ram()
    with pytest.raises(ForeignStep, match="step 4: another program wrote it"):
        restored(world)


def test_step_written_again_by_another_program_is_not_ours(world: World) -> None:
    save(world, 2, 4)
    plain(world.persistent, 4, value=40)
    with pytest.raises(ForeignStep, match="step 4: another program wrote it"):
        restored(world)
    assert adopted(world) == ["step 4"]
    assert restored(world) == (4, 40.0)
    plain(world.persistent, 2, value=20)
    assert restored(world) == (4, 40.0), "what is newer and whole needs no adoption"


def save_3_from_2(world: World) -> None:
    """Restore step 2 by its number and save step 3, which leaves every other step behind."""
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.restore(2, state=LIKE)[0] == 2
        assert ckpt.save(step=3, state={"w": np.full(4, 3, np.float32)})
        finish(ckpt)
    world.lose_ram()
    assert complete_steps(str(world.persistent)) == [2, 3]
    assert restored(world) == (3, 3.0)


def test_adopted_steps_can_be_rolled_back(world: World) -> None:
    save(world, 2)
    plain(world.persistent, 4, 6)
    assert adopted(world) == ["step 4", "step 6"]
    save_3_from_2(world)
    assert restored(world, 6) == (6, 6.0)


def test_adopted_steps_are_rolled_back_by_an_older_restore(world: World) -> None:
    plain(world.persistent, 2, 4)
    save_3_from_2(world)
    assert restored(world, 4) == (4, 4.0)


@pytest.mark.parametrize("tier", ["both", "ram"])
def test_save_without_restore_leaves_adopted_steps_behind(world: World, tier: str) -> None:
    """As it leaves those of earlier lives: with a warning that names the newest."""
    plain(world.persistent, 2, 4)
    with world.open_both(save_every=1 if tier == "both" else 1000, local_save_every=1) as ckpt:
        assert ckpt.save(step=3, state={"w": np.full(4, 3, np.float32)})
        finish(ckpt)
    (warning,) = world.named("warning", cause="without_restore")
    assert (warning.fields["step"], warning.fields["newest"]) == (3, 4)
    if tier == "both":
        world.lose_ram()
    assert restored(world, save_every=1000, local_save_every=1) == (3, 3.0)
    assert restored(world, 4) == (4, 4.0)


def test_rollback_in_ram_leaves_adopted_steps_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage fails, so its log learns of a later start, and of no chain and no step."""
    plain(world.persistent, 2, 4)
    with monkeypatch.context() as failing:
        call_fails(failing, DirectoryWriter, "begin")
        with world.open_both(save_every=1000, local_save_every=1) as ckpt:
            assert ckpt.restore(2, state=LIKE)[0] == 2
            assert ckpt.save(step=3, state={"w": np.full(4, 3, np.float32)})
            finish(ckpt)
    with world.open_both(save_every=1000):
        pass
    assert restored(world, save_every=1000, local_save_every=1) == (3, 3.0)


def test_restore_of_an_adopted_step_keeps_older_steps(world: World) -> None:
    with world.open_both(**STORAGE) as ckpt:
        for step in (1, 2):
            assert ckpt.save(step=step, state={"w": np.full(4, step, np.float32)})
            finish(ckpt)
    world.lose_ram()
    plain(world.persistent, 4)
    assert adopted(world) == ["step 4"]
    save(world, 5)
    assert complete_steps(str(world.persistent)) == [1, 2, 4, 5]


def test_adoption_beside_a_job_is_kept_by_its_next_save(world: World) -> None:
    with world.open_both(**STORAGE) as ckpt:
        for step in (1, 2):
            assert ckpt.save(step=step, state={"w": np.full(4, step, np.float32)})
            finish(ckpt)
        plain(world.persistent, 4)
        assert adopted(world) == ["step 4"]
        assert ckpt.save(step=5, state={"w": np.full(4, 5, np.float32)})
        finish(ckpt)
    world.lose_ram()
    assert complete_steps(str(world.persistent)) == [1, 2, 4, 5]


def test_step_that_a_job_saves_during_an_adoption_stays_the_jobs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other program removes its step, and the job saves the number, before it is listed."""
    save(world, 2)
    plain(world.persistent, 4, value=40)
    inspect_each, looks = StoredSteps.inspect_each, [True]

    def inspect_and_save(own: StoredSteps, *args: Any) -> Any:
        found = inspect_each(own, *args)
        if looks:
            looks.pop()
            shutil.rmtree(world.persistent / "4")
            save(world, 4)
        return found

    monkeypatch.setattr(StoredSteps, "inspect_each", inspect_and_save)
    assert adopted(world) == []
    assert restored(world) == (4, 4.0)


@pytest.mark.parametrize("stage", ["write_document", "finish"])
def test_step_in_place_of_a_failed_save_is_not_ours(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The next save clears what the failed one left, and neither lists nor removes the step."""
    with world.open_both(**STORAGE) as ckpt:
        assert ckpt.save(step=2, state=LIKE)
        finish(ckpt)
        storage_fails(monkeypatch, stage, once=True)
        assert ckpt.save(step=4, state=LIKE)
        with pytest.raises(SaveFailed):
            finish(ckpt)
        shutil.rmtree(world.persistent / "4", ignore_errors=True)
        plain(world.persistent, 4, value=40)
        assert ckpt.save(step=5, state=LIKE)
        finish(ckpt)
        assert complete_steps(str(world.persistent)) == [2, 5]
    world.lose_ram()
    assert adopted(world) == ["step 4"]
    assert restored(world, 4) == (4, 40.0)


def test_ls_says_what_the_log_does_not_name(world: World) -> None:
    save(world, 2)
    plain(world.persistent, 4)
    status, listed = eckpt_json("ls", "--dir", world.persistent)
    assert status == 1
    assert "the step log does not name it" in str(listed)
    assert eckpt("doctor", "--adopt").returncode == 2
    empty = world.persistent / "empty"
    empty.mkdir()
    done = eckpt("doctor", "--adopt", "--dir", empty)
    assert (done.returncode, "no step log" in done.stdout) == (0, True)
