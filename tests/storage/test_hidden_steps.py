"""A step that was rolled back is hidden, and goes when its number is saved again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from persistent_steps import RUN_ID, complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.storage.pinned import Pinned
from emergency_ckpt.types import SaveId

A, B, C = (life(number) for number in range(1, 4))
BACK_TO_2 = continued(None, SaveId(2, A, RUN_ID), C)


def write_plain(directory: Path, step: int, value: int) -> None:
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, value)}))


def write_ours(directory: Path, step: int, value: int) -> None:
    save_over(PersistentTier(str(directory)), step, value, A)


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.rolled-back-*"))


def hidden_saves(tier: PersistentTier) -> list[tuple[int, str]]:
    table = tier.found.log.read().table
    assert table is not None
    return [(entry.step, entry.incarnation) for entry in table.steps if entry.state == "hidden"]


def rolled_back(directory: Path, write: Any = write_ours) -> PersistentTier:
    """A life went back to step 2, and ended before it saved."""
    write_ours(directory, 2, 2)
    write(directory, 4, 4)
    tier = PersistentTier(str(directory))
    writer_of(tier).adopt()
    told = list[dict[str, Any]]()
    writer = writer_of(tier, emit=lambda name, **fields: told.append({"name": name, **fields}))
    writer.begin(B, BACK_TO_2)
    (moved,) = (each for each in told if each.get("stage") == "hidden")
    assert moved["step"] == 4
    assert hidden(directory) == [moved["kept_as"]]
    return PersistentTier(str(directory))


@pytest.mark.parametrize("write", [write_ours, write_plain])
def test_hidden_step_does_not_count_and_is_read_by_its_number(tmp_path: Path, write: Any) -> None:
    tier = rolled_back(tmp_path, write)
    assert complete_steps(tier) == [2]
    assert value_of(tier, 4) == 4
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2]


def test_save_over_a_hidden_step_removes_it_first(tmp_path: Path) -> None:
    tier = rolled_back(tmp_path)
    writer = writer_of(tier)
    writer.begin(C)
    writer.make_room(4)
    assert sorted(os.listdir(tmp_path)) == ["2", "host_state"]
    assert sorted(os.listdir(tmp_path / "host_state")) == ["2", "log"]
    save_over(tier, 4, 40, C, writer=writer)
    assert (complete_steps(tier), value_of(tier, 4)) == ([2, 4], 40)


def test_step_is_rolled_back_before_it_is_removed(
    tmp_path: Path,
) -> None:
    """A crash in the save leaves the rollback on record, and the step to which it leads."""
    for step in (2, 4, 6):
        write_ours(tmp_path, step, step)
    tier = PersistentTier(str(tmp_path))

    def die(point: str) -> None:
        if point == "room":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_over(tier, 4, 40, C, chain=BACK_TO_2, at=die)
    assert complete_steps(tier) == [2]
    assert value_of(tier, 6) == 6, "hidden, since nothing was saved in its place"


def test_room_for_a_hidden_number_waits_for_no_other_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older step cannot be deleted, and each attempt takes as long as a call may."""
    rolled_back(tmp_path)
    writer = writer_of(PersistentTier(str(tmp_path), timeout_s=0.5))
    writer.begin(C)
    asked, clear = list[str](), Pinned.clear

    def refused(pinned: Pinned, name: str, at: str = "") -> None:
        asked.append(name)
        if name == "2":
            raise ConnectionError("the server does not delete now")
        clear(pinned, name, at)

    monkeypatch.setattr(Pinned, "clear", refused)
    writer.retire(2)
    assert "2" in asked
    asked.clear()
    writer.make_room(4)
    assert asked
    assert "2" not in asked


def test_removal_takes_no_hidden_step(tmp_path: Path) -> None:
    """Retention has chosen it, and a rollback came first."""
    tier = rolled_back(tmp_path)
    writer_of(tier).remove([4], B)
    assert value_of(tier, 4) == 4


@pytest.mark.parametrize("write", [write_ours, write_plain])
def test_another_step_in_the_own_place_of_a_hidden_one_stays(tmp_path: Path, write: Any) -> None:
    """As one that plain Orbax writes there; the hidden one is removed by its own name."""
    tier = rolled_back(tmp_path, write)
    write_plain(tmp_path, 4, 44)
    writer = writer_of(tier)
    writer.begin(C)
    assert writer.remove_hidden(hidden_saves(tier), C) == {4}
    assert hidden(tmp_path) == []
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2, 4]


def test_step_hidden_anew_is_not_removed_for_the_old_one(tmp_path: Path) -> None:
    """Somebody chose step 4 by its age; a job then saved another step 4, and rolled it back."""
    tier = rolled_back(tmp_path)
    chosen = hidden_saves(tier)
    save_over(tier, 4, 40, C, chain=BACK_TO_2)
    later = life(4)
    writer = writer_of(tier)
    writer.begin(later, continued(BACK_TO_2, SaveId(2, A, RUN_ID), later))
    assert [step for step, _ in hidden_saves(tier)] == [4]
    assert writer.remove_hidden(chosen, later) == set()
    assert value_of(tier, 4) == 40


def test_damaged_version_brings_no_hidden_step_back(tmp_path: Path) -> None:
    tier = rolled_back(tmp_path)
    (*_, newest) = sorted((tmp_path / "host_state" / "log").glob("*.json"))
    data = newest.read_bytes()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        newest.write_bytes(data[:cut])
        assert complete_steps(tier) == [2]
        assert value_of(tier, 4) == 4
    save_over(tier, 6, 6, C)
    assert complete_steps(tier) == [2, 6]
    assert value_of(tier, 4) == 4


def test_look_beside_a_rename_finds_the_step(tmp_path: Path) -> None:
    """What was listed has been hidden when it is looked at."""
    write_ours(tmp_path, 2, 2)
    write_ours(tmp_path, 4, 4)
    tier, writer = PersistentTier(str(tmp_path)), writer_of(PersistentTier(str(tmp_path)))
    view = tier.found.view()
    writer.begin(B, BACK_TO_2)
    found = tier.found.inspect_each(view, view.steps)[-1]
    assert not isinstance(found, CheckpointError | None)
    assert (found.step.step, found.step.problem) == (4, "")
    assert tier.describe(found).leaves.keys() == {"w"}


def test_crash_between_a_rename_and_its_version_loses_nothing(tmp_path: Path) -> None:
    tier = rolled_back(tmp_path)
    (*_, newest) = sorted((tmp_path / "host_state" / "log").glob("*.json"))
    newest.unlink()
    assert complete_steps(tier) == [2]
    assert value_of(tier, 4) == 4
    writer_of(tier).begin(C)
    assert value_of(PersistentTier(str(tmp_path)), 4) == 4
    assert complete_steps(tier) == [2]
