"""The end of a run whose last save to storage has failed: an error, never exit status 0."""

from __future__ import annotations

import orbax.checkpoint as ocp
import pytest
from every_face import opener
from faults import SlowStorage, call_fails, copies_to_slots_fail, storage_fails
from orbax_faces import state
from world import LONG_S, World, logged, save, storage_lacks

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import CheckpointError, SaveFailed

NEVER = {"local_save_every": 100, "save_every": 100}


def save_in_vain(checkpointer: EmergencyCheckpointer, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        storage_fails(patch, "finish")
        assert save(checkpointer, world, 2)
        checkpointer.wait_until_finished(LONG_S)


def test_with_block_whose_last_save_to_storage_failed_raises(world: World) -> None:
    with storage_lacks(2, "storage failed"), world.open_both() as checkpointer:
        save_in_vain(checkpointer, world)
    checkpointer.stop()  # idempotent: the error was raised


def test_stop_releases_everything_before_it_raises(world: World) -> None:
    checkpointer = world.open_both()
    save_in_vain(checkpointer, world)
    with pytest.raises(SaveFailed, match=r"step 2 to storage failed: .*storage failed"):
        checkpointer.stop()
    world.restores(2)  # the ramdisk is free, and has the step


def test_exit_with_status_0_is_a_normal_end(world: World) -> None:
    with storage_lacks(2, "storage failed"), world.open_both() as checkpointer:
        save_in_vain(checkpointer, world)
        raise SystemExit(0)


@pytest.mark.parametrize("error", [ValueError("of the loop"), SystemExit(143), SystemExit(3)])
def test_error_of_the_loop_is_not_replaced(world: World, error: BaseException) -> None:
    def run() -> None:
        with world.open_both() as checkpointer:
            save_in_vain(checkpointer, world)
            raise error

    with logged() as lines:
        with pytest.raises(type(error)) as found:
            run()
        assert found.value is error
    assert sum("the save of step 2 to storage failed" in line for line in lines) == 1


@pytest.mark.parametrize("kind", ["emergency", "v0"])
@pytest.mark.parametrize("code", [None, 0, 3, 143])
def test_exit_from_a_face_of_orbax_has_the_status_of_its_saves(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, code: int | None
) -> None:
    face = opener(kind, world)()
    storage_fails(monkeypatch, "finish")
    call_fails(monkeypatch, ocp.PyTreeCheckpointHandler, "finalize")  # where Orbax writes

    def run() -> None:
        with face.own:
            face.save(0, state(world, 0))
            raise SystemExit(code)

    told = "storage failed" if code in (None, 0) else f"^{code}$"
    with pytest.raises((CheckpointError, SystemExit), match=told):
        run()


def test_later_save_to_storage_makes_a_failed_one_good(world: World) -> None:
    with world.open_both() as checkpointer:
        save_in_vain(checkpointer, world)
        assert save(checkpointer, world, 4)


def test_same_step_saved_again_makes_a_failed_save_good(world: World) -> None:
    with world.open_both() as checkpointer:
        save_in_vain(checkpointer, world)
        assert save(checkpointer, world, 2, force=True)


def test_save_of_an_earlier_step_does_not_make_a_forced_one_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forced save found the earlier one under way, and was left out."""
    slow = SlowStorage(monkeypatch)
    with (
        storage_lacks(3, "the previous save"),
        world.open_both(save_timeout_s=2.0, storage_wait_timeout_s=0.0) as checkpointer,
    ):
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        save(checkpointer, world, 3, force=True)
        slow.go_on.set()
    assert [e.fields["step"] for e in world.events if e.name == "persistent.complete"] == [2]


def test_save_left_out_without_force_is_no_error_of_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowStorage(monkeypatch)
    with world.open_both(storage_wait_timeout_s=0.0) as checkpointer:
        assert save(checkpointer, world, 2)
        assert slow.reached.wait(LONG_S)
        assert save(checkpointer, world, 4)  # to RAM alone
        slow.go_on.set()
    skipped = [e.fields["step"] for e in world.named("save.skipped", cause="busy")]
    assert skipped == [4]


def test_failed_save_to_ram_is_no_error_of_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_to_slots_fail(monkeypatch)
    with world.open_both(save_every=0) as checkpointer:
        assert save(checkpointer, world, 1)
        checkpointer.wait_until_finished(LONG_S)
    assert checkpointer.failed_saves == 1


def test_error_that_was_raised_before_is_not_raised_at_the_end(world: World) -> None:
    with world.open_both() as checkpointer:
        save_in_vain(checkpointer, world)
        with pytest.raises(SaveFailed, match="storage failed"):
            checkpointer.check_for_errors()


def test_failed_save_of_a_step_that_was_rolled_back_is_none(world: World) -> None:
    with world.open_both() as checkpointer:
        assert save(checkpointer, world, 1)
        save_in_vain(checkpointer, world)
        world.restores(1, asked=1, by=checkpointer)
