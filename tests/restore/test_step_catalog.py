"""Steps over both tiers: what is there, what is in one, removal, and going back to an older one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from faults import host_states_are_too_large, storage_fails
from orbax.checkpoint import checkpoint_managers as ocm
from world import World, same, save_all

from emergency_ckpt.config.policies import PerProcessPolicy
from emergency_ckpt.errors import (
    CheckpointError,
    InvalidState,
    PersistentTierError,
    StepNotFound,
)
from emergency_ckpt.restore.request import CompleteSteps

KEEPS_THREE: dict[str, Any] = {
    "local_keep_last_n": 3,
    "save_every": 4,
}


def test_more_steps_than_one_are_kept_in_ram(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as first:
        save_all(first, world, *range(1, 8))
        assert first.known_steps == CompleteSteps((5, 6, 7), (4,))
    # One more where a save to storage still read a slot when the next was due.
    assert len(list(world.ramdisk.rglob("slot_*.bin"))) in (4, 5)
    with world.open_both(**KEEPS_THREE) as second:
        found = second.steps.survey(world.state(0))
        # Older steps stay until a save takes their memory.
        assert (found.local[-3:], found.persistent) == ((5, 6, 7), (4,))
        for step in (5, 7, 4, 6):
            found, state = second.restore(step, state=world.state(0))
            assert found == step
            assert same(state, world.state(step))


def test_newer_steps_are_forgotten_at_the_next_save(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 1, 2, 3)
        ckpt.restore(1, state=world.state(0))
        assert ckpt.steps.survey(world.state(0)).local == (1, 2, 3)
        assert ckpt.save(step=2, state=world.state(20), host_state={"at": 20})
        ckpt.wait_until_finished()
        assert ckpt.steps.survey(world.state(0)).local == (1, 2)
        assert same(ckpt.restore(state=world.state(0))[1], world.state(20))


def test_state_of_another_shape_does_not_hide_steps(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 1, 2)
        assert ckpt.steps.survey({"other": 1.0}).local == (1, 2)


def test_what_is_in_a_step(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        for step in (3, 4, 5):
            ckpt.save(
                step=step, state=world.state(step), host_state={"at": step}, metrics={"l": step}
            )
            ckpt.wait_until_finished()
        in_ram, in_both = ckpt.steps.describe(5), ckpt.steps.describe(4)
        assert (in_ram.tier, in_ram.written_s, in_ram.metrics) == ("local", None, None)
        assert (in_both.host_state, in_both.metrics) == ({"at": 4}, {"l": 4})
        assert in_both.written_s is not None
        shapes = {leaf.path: leaf.global_shape for leaf in in_ram.leaves}
        assert (shapes["w"], shapes["empty"], shapes["step"]) == ((8, 4), (0, 4), ())
        with pytest.raises(StepNotFound):
            ckpt.steps.describe(9)
    world.lose_ram()
    with world.open_both(**KEEPS_THREE) as ckpt:
        assert ckpt.steps.describe(4)._replace(tier="") == in_both._replace(tier="")


def test_contents_in_ram_need_no_storage(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 3, 4)
        away = world.persistent.with_name("away")
        world.persistent.rename(away)
        world.persistent.symlink_to(world.persistent)
        found = ckpt.steps.describe(4)
        assert (found.tier, found.host_state, found.metrics) == ("local", {"at": 4}, None)
        assert world.named("persistent.problem", cause="unreachable")
        with pytest.raises(PersistentTierError):
            ckpt.steps.describe(9)
        world.persistent.unlink()
        away.rename(world.persistent)


def test_removed_step_is_gone_for_good(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 3, 4, 5)
        ckpt.steps.remove(5)
        ckpt.steps.remove(4)
        assert ckpt.steps.survey(world.state(0)) == CompleteSteps((3,), ())
        assert ckpt.restore(state=world.state(0))[0] == 3
        ckpt.steps.remove(3)
    with world.open_both(**KEEPS_THREE) as ckpt:
        assert ckpt.restore(state=world.state(0))[0] is None


def test_step_whose_removal_failed_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each process alike, whichever of them has failed; it is saved again."""
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 3, 4)
        with monkeypatch.context() as patch:
            storage_fails(patch, "remove")
            with pytest.raises(PersistentTierError, match="storage failed"):
                ckpt.steps.remove(4)
        assert ckpt.known_steps == CompleteSteps((3,), ())
        save_all(ckpt, world, 4)
        assert ckpt.known_steps == CompleteSteps((3, 4), (4,))


def test_step_left_by_a_removal_outlives_failures(world: World) -> None:
    with world.open(local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 1, 2)
        ckpt.steps.remove(2)
        assert ckpt.all_steps() == [1]
        for step in (3, 4, 5, 6):
            with host_states_are_too_large():
                ckpt.save(step=step, state=world.state(step), host_state={"at": step})
                ckpt.wait_until_finished()
            assert ckpt.steps.survey(world.state(0)).local == (1,)
    with world.open(local_keep_last_n=2) as ckpt:
        assert ckpt.restore(state=world.state(0), host_state={"at": 0})[0] == 1


def test_removed_step_is_gone_in_adopted_directories(world: World) -> None:
    """Of another process that had this ramdisk, and that the job now lacks."""
    with world.open(local_keep_last_n=2) as ckpt:
        save_all(ckpt, world, 1, 2)
    (directory,) = (world.ramdisk / "run").glob("process_*")
    shutil.copytree(directory, directory.with_name("process_00001"))
    with world.open(local_keep_last_n=2) as ckpt:
        ckpt.steps.remove(2)
        assert ckpt.steps.survey(world.state(0)).local == (1,)
        assert ckpt.restore(state=world.state(0))[0] == 1


def test_deleted_ramdisk_is_noticed(world: World) -> None:
    with world.open_both(**KEEPS_THREE) as ckpt:
        save_all(ckpt, world, 1)
        assert ckpt.steps.ramdisks_intact()
        world.lose_ram()
        assert not ckpt.steps.ramdisks_intact()


class Thirds:
    """A policy of the user's own."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return step.step % 3 == 0 and len(previous_steps) < 2


def test_policy_asked_on_every_process_is_asked_at_each_step(world: World) -> None:
    policy = PerProcessPolicy(ocm.AnySavePolicy([Thirds(), ocm.SpecificStepsPolicy([5])]))
    with world.open(local_save_every=policy) as ckpt:
        due = []
        for step in range(10):
            looked = ckpt.should_save(step)
            assert ckpt.should_save(step) == looked, "looking again changes nothing"
            if ckpt.save(step=step, state=world.state(step)):
                due.append(step)
            assert looked == (step in due)
        assert due == [0, 3, 5]
    with pytest.raises(CheckpointError):
        ckpt.should_save(11)


def test_nothing_is_due_up_to_what_is_there(world: World) -> None:
    with world.open_both() as ckpt:
        ckpt.go_on_after(CompleteSteps((3,), (4,)))
        assert [step for step in range(7) if ckpt.should_save(step)] == [4, 5, 6]
        with pytest.raises(InvalidState, match="step 4, which was saved or restored, is newer"):
            ckpt.save(step=3, state=world.state(3), force=True)
