"""A step whose number is saved again is there, old or new."""

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
from emergency_ckpt.types import SaveId

A, B, C = (life(number) for number in range(1, 4))
BACK_TO_2 = continued(None, SaveId(2, A, RUN_ID), C)


def write_plain(directory: Path, step: int, value: int) -> None:
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, value)}))


def write_ours(directory: Path, step: int, value: int) -> None:
    save_over(PersistentTier(str(directory)), step, value, A)


def aside(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.rolled-back-*"))


def cut_short(directory: Path, write: Any = write_ours) -> PersistentTier:
    """Step 4 was moved aside for a save that ended before its tensors."""
    write_ours(directory, 2, 2)
    write(directory, 4, 4)
    tier = PersistentTier(str(directory))
    writer = writer_of(tier)
    writer.begin(B)
    moved = writer.make_room(4, "saved anew")
    assert moved is not None
    assert aside(directory) == [moved.folder]
    tier.write_document(4, 0, 1, b"{}")
    assert value_of(tier, 4) == 4
    return PersistentTier(str(directory))


def test_replaced_step_removed_counts_no_more(tmp_path: Path) -> None:
    tier = cut_short(tmp_path)
    writer_of(tier).remove([4], C)
    assert complete_steps(tier) == [2]
    assert sorted(os.listdir(tmp_path)) == ["2", "host_state"]
    assert sorted(os.listdir(tmp_path / "host_state")) == ["2", "log"]


@pytest.mark.parametrize("write", [write_ours, write_plain])
def test_replaced_step_is_one_step(tmp_path: Path, write: Any) -> None:
    tier = cut_short(tmp_path, write)
    table = tier.found.log.read().table
    assert table is not None
    assert [entry.step for entry in table.counting()] == complete_steps(tier) == [2, 4]


def test_replaced_step_rolled_back_counts_no_more(tmp_path: Path) -> None:
    tier = cut_short(tmp_path)
    (moved,) = writer_of(tier).begin(C, BACK_TO_2)
    assert (moved.step, [moved.folder]) == (4, aside(tmp_path))
    assert complete_steps(tier) == [2]
    assert sorted(os.listdir(tmp_path)) == ["2", moved.folder, "host_state"]


def test_successor_rolled_back_does_not_bring_the_first_back(tmp_path: Path) -> None:
    """The second save was whole, and its life ended before it settled."""
    tier = cut_short(tmp_path)
    save_over(tier, 4, 40, B)
    assert value_of(tier, 4) == 40
    writer_of(tier).begin(C, BACK_TO_2)
    assert complete_steps(tier) == [2]
    writer_of(tier).begin(life(4))
    assert complete_steps(tier) == [2]
    assert [name.partition(".")[0] for name in aside(tmp_path)] == ["4", "4"]


def test_replaced_step_with_a_problem_is_still_named(tmp_path: Path) -> None:
    write_ours(tmp_path, 4, 4)
    marker = tmp_path / "host_state" / "4" / "marker.json"
    marker.write_bytes(marker.read_bytes()[:-9])
    tier = PersistentTier(str(tmp_path))
    writer = writer_of(tier)
    writer.begin(B)
    writer.make_room(4, "saved anew")
    found = tier.found.find(4)
    assert found is not None
    assert (found.step.step, "cannot be used" in found.step.problem) == (4, True)


def test_version_damaged_beside_a_replaced_step_hides_it_not(tmp_path: Path) -> None:
    """It may be the newest: an older one is not taken in its place."""
    tier = cut_short(tmp_path)
    (*_, newest) = sorted((tmp_path / "host_state" / "log").glob("*.json"))
    data = newest.read_bytes()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        newest.write_bytes(data[:cut])
        assert complete_steps(tier) == [2, 4]
        assert value_of(tier, 4) == 4
    save_over(tier, 6, 6, C)
    assert complete_steps(tier) == [2, 4, 6]
    assert value_of(tier, 4) == 4


def test_look_beside_a_move_finds_the_step(tmp_path: Path) -> None:
    """What was listed has been moved aside when it is looked at."""
    write_ours(tmp_path, 4, 4)
    tier, writer = PersistentTier(str(tmp_path)), writer_of(PersistentTier(str(tmp_path)))
    view = tier.found.view()
    writer.begin(B)
    assert writer.make_room(4, "saved anew")
    (found,) = tier.found.inspect_each(view, view.steps)
    assert not isinstance(found, CheckpointError | None)
    assert (found.step.step, found.step.problem) == (4, "")
    assert tier.describe(found).leaves.keys() == {"w"}
