"""TensorStore ends a write that was given up when it likes: no later save of the step has it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from held_commits import LONG_S, HeldCommit, at_merge
from persistent_steps import life, save_over, value_of
from world import World, same, save_all

from emergency_ckpt.errors import PersistentTierError, SaveFailed
from emergency_ckpt.storage import PersistentTier

STEP = 4


@pytest.mark.parametrize("again", [life(1), life(2)])
def test_commit_after_its_save_was_given_up_is_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """The step is saved again with other values before the commit of the first save comes.

    By the next life, or by the same one under the same name.
    """
    tier = PersistentTier(str(tmp_path / "run"))
    save_over(tier, 2, 7, life(1))
    held, errors = HeldCommit(), list[PersistentTierError]()

    def save() -> None:
        try:
            save_over(tier, STEP, 1, life(1))
        except PersistentTierError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    held.give_up()
    thread.join(LONG_S)
    assert "the save was cancelled" in str(errors[0])
    at_merge(monkeypatch, held.end)
    save_over(tier, STEP, 2, again)
    assert value_of(tier, STEP) == 2
    assert value_of(tier, 2) == 7
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        stored = manager.restore(STEP, args=args).state
    assert stored["w"].tolist() == [2] * 4


def test_folder_of_another_attempt_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another life clears the place of a save that is under way, and begins its own there."""
    tier = PersistentTier(str(tmp_path / "run"))
    save_over(tier, 2, 7, life(1))
    folder = tmp_path / "run" / f"{STEP}.orbax-checkpoint-tmp-eckpt-another"

    def clear_and_begin() -> None:
        (own,) = (tmp_path / "run").glob(f"{STEP}.orbax-checkpoint-tmp-*")
        shutil.rmtree(own)
        (folder / "state").mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").write_text("another's")

    at_merge(monkeypatch, clear_and_begin)
    with pytest.raises(PersistentTierError, match="by another process meanwhile"):
        save_over(tier, STEP, 1, life(1))
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert left == ["_CHECKPOINT_METADATA", "state"]
    assert value_of(tier, 2) == 7


def test_rollback_while_a_pinned_slot_is_written_leaves_one_save(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes back and saves the step anew; TensorStore still has the slot of the first."""
    with world.open_both() as checkpointer:
        save_all(checkpointer, world, 2)
        held = HeldCommit()
        assert checkpointer.save(step=STEP, state=world.state(STEP), host_state={"at": STEP})
        held.give_up()
        checkpointer.wait_until_finished()
        with pytest.raises(SaveFailed, match="the save was cancelled"):
            checkpointer.check_for_errors()
        position: dict[str, int] = {}
        restored = checkpointer.restore(step=2, state=world.state(0), host_state=position)
        assert (restored[0], position) == (2, {"at": 2})
        at_merge(monkeypatch, held.end)
        anew = world.state(STEP + 100)
        assert checkpointer.save(step=STEP, state=anew, host_state={"at": STEP + 100})
        checkpointer.wait_until_finished()
        save_all(checkpointer, world, 5)
        assert checkpointer.failed_saves == 1
        assert np.array_equal(restored[1]["w"], world.state(2)["w"])
    sources = [e.fields["source"] for e in world.events if e.point == "persistent.stage.captured"]
    assert sources[:2] == ["slot", "slot"]
    world.lose_ram()
    with world.open_both() as checkpointer:
        step, state = checkpointer.restore(state=world.state(0), host_state=position)
    assert (step, position) == (STEP, {"at": STEP + 100})
    assert same(state, anew)
