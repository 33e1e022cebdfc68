"""A step whose number is saved again is there, old or new, wherever the second save ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from persistent_steps import save_over, value_of

from emergency_ckpt.core.limits import MAX_MARKER_BYTES
from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import CheckpointError, CorruptData, PersistentTierError
from emergency_ckpt.tiers.persistent.steps.removal import StepRecords
from emergency_ckpt.tiers.persistent.steps.replaced import (
    ReplacedStep,
    aside_name,
    decode_replaced,
    encode_replaced,
)
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.types import SaveId

A, B, C = (f"{number:012x}-life" for number in range(1, 4))
CHANGES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"})


class Changes:
    """The changes that Python makes below a directory: counted, and from one on refused."""

    def __init__(self) -> None:
        self.directory = ""
        self.left = 0
        sys.addaudithook(self)  # there is no way to take it off again

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.directory or event not in CHANGES:
            return
        if event == "open" and not arguments[2] & os.O_ACCMODE:
            return
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike)]
        if not any(path.startswith(self.directory) for path in paths):
            return
        self.left -= 1
        if self.left < 0:
            raise PermissionError("as if the process had died")

    @contextlib.contextmanager
    def end_after(self, directory: Path, changes: int) -> Generator[None]:
        self.directory, self.left = str(directory), changes
        try:
            yield
        finally:
            self.directory = ""


CHANGED = Changes()


def write_plain(directory: Path, step: int, value: int) -> None:
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(4, value)}))


def write_ours(directory: Path, step: int, value: int) -> None:
    save_over(PersistentTier(str(directory)), step, value, A)


def records(directory: Path) -> list[str]:
    return [path.name for path in (directory / "host_state").glob("*.json")]


def replaced_until(directory: Path, changes: int) -> PersistentTier:
    """A save of step 4 that ends after so many changes; the tier of the next life."""
    with CHANGED.end_after(directory, changes), contextlib.suppress(CheckpointError):
        save_over(PersistentTier(str(directory)), 4, 40, B)
    return PersistentTier(str(directory))


@pytest.mark.parametrize("write", [write_ours, write_plain])
def test_step_replaced_until_any_change_is_old_or_new(tmp_path: Path, write: Any) -> None:
    before = tmp_path / "before"
    write_ours(before, 2, 2)
    write(before, 4, 4)
    seen: list[int] = []
    while not seen or CHANGED.left < 0:
        directory = tmp_path / str(len(seen))
        shutil.copytree(before, directory)
        tier = replaced_until(directory, len(seen))
        ended = CHANGED.left
        assert [found.step for found in tier.steps() if not found.problem] == [2, 4]
        seen.append(value_of(tier, 4))
        tier.remove_leftovers()  # as the next life does
        assert value_of(tier, 4) == seen[-1]
        save_over(tier, 4, 41, C)
        assert value_of(PersistentTier(str(directory)), 4) == 41
        assert records(directory) == []
        kept = [path.name.partition(".")[0] for path in directory.glob("*.rolled-back-*")]
        # Once, and what was whole of the second life's too: nothing is lost.
        assert kept == ["4"] * (1 + (seen[-1] == 40))
        CHANGED.left = ended
    assert seen[0] == 4
    assert seen[-1] == 40
    assert seen == sorted(seen)


def cut_short(directory: Path, write: Any = write_ours) -> PersistentTier:
    """Step 4 was moved aside for a save that ended before its tensors."""
    write_ours(directory, 2, 2)
    write(directory, 4, 4)
    tier = PersistentTier(str(directory))
    tier.changes.make_room(4, "saved anew")
    tier.write_document(4, 0, 1, b"{}")
    assert value_of(tier, 4) == 4
    return PersistentTier(str(directory))


def test_replaced_step_removed_counts_no_more(tmp_path: Path) -> None:
    tier = cut_short(tmp_path)
    StepRecords(tier).remove(4)
    assert tier.whole_steps() == [2]
    assert records(tmp_path) == []


def test_replaced_step_is_one_for_retention(tmp_path: Path) -> None:
    records_before = StepRecords(cut_short(tmp_path)).records()
    assert [record.step for record in records_before] == [2, 4]


def test_replaced_step_rolled_back_counts_no_more(tmp_path: Path) -> None:
    tier = cut_short(tmp_path)
    timeline = continued(None, SaveId(2, A, "run"), C)
    assert tier.changes.follow(timeline) == [(4, aside_name(4, A))]
    assert tier.whole_steps() == [2]
    assert records(tmp_path) == ["timeline.json"]


def test_successor_rolled_back_does_not_bring_the_first_back(tmp_path: Path) -> None:
    """The second save was whole, and its life ended before the record was struck."""
    tier = cut_short(tmp_path)
    record = (tmp_path / "host_state" / "replacing.json").read_bytes()
    save_over(tier, 4, 40, B)
    (tmp_path / "host_state" / "replacing.json").write_bytes(record)
    assert value_of(tier, 4) == 40
    tier.changes.follow(continued(None, SaveId(2, A, "run"), C))
    assert tier.whole_steps() == [2]
    tier.remove_leftovers()
    assert tier.whole_steps() == [2]


def test_replaced_step_with_a_problem_is_still_named(tmp_path: Path) -> None:
    write_ours(tmp_path, 4, 4)
    marker = tmp_path / "host_state" / "4" / "marker.json"
    marker.write_bytes(marker.read_bytes()[:-9])
    tier = PersistentTier(str(tmp_path))
    tier.changes.make_room(4, "saved anew")
    (found,) = tier.steps()
    assert (found.step, "cannot be read" in found.problem) == (4, True)


def test_record_unreadable_is_an_error_until_a_save(tmp_path: Path) -> None:
    """The step that it hides may be the newest: an older one is not taken in its place."""
    tier = cut_short(tmp_path)
    path = tmp_path / "host_state" / "replacing.json"
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        data[place] ^= 4
        path.write_bytes(data)
        with pytest.raises(CorruptData, match=r"replacing\.json"):
            tier.steps()
        data[place] ^= 4
    path.write_bytes(data[:-1])
    save_over(tier, 6, 6, B)
    assert tier.whole_steps() == [2, 6]
    assert (tmp_path / aside_name(4, A) / "default").exists()


@pytest.mark.parametrize(
    ("step", "kept_as"),
    [(4, "4.rolled-back-/../../2"), (4, "2"), (-1, "-1.rolled-back-x"), (4, "5.rolled-back-x")],
)
def test_decode_replaced_refuses_other_folders(step: int, kept_as: str) -> None:
    entry = ReplacedStep(step, A, kept_as, is_plain=False, is_kept=True)
    with pytest.raises(CorruptData, match="folder"):
        decode_replaced(encode_replaced({step: entry}), "replacing.json")


def test_replaced_record_is_read_as_written() -> None:
    entries = {n: ReplacedStep(n, A, aside_name(n, A), n == 3, n == 4) for n in (4, 3)}
    assert decode_replaced(encode_replaced(entries), "x") == entries
    with pytest.raises(CorruptData, match="larger"):
        decode_replaced(b" " * (MAX_MARKER_BYTES + 1), "x")


def test_listing_beside_a_move_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ours(tmp_path, 4, 4)
    tier, other = PersistentTier(str(tmp_path)), PersistentTier(str(tmp_path))
    listed = tier.found.listed

    def list_then_move(deadline_s: float | None) -> dict[int, bool]:
        found = listed(deadline_s)
        if not (tmp_path / aside_name(4, A)).exists():
            other.changes.make_room(4, "saved anew")
        return found

    monkeypatch.setattr(tier.found, "listed", list_then_move)
    assert [found.step for found in tier.steps()] == [4]


def test_failed_save_leaves_the_step_that_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ours(tmp_path, 4, 4)
    tier = PersistentTier(str(tmp_path))

    def fail(*_: Any) -> None:
        raise PersistentTierError("save", "step 4", "storage failed")

    with monkeypatch.context() as patch:
        patch.setattr(tier, "publish", fail)
        with pytest.raises(PersistentTierError):
            save_over(tier, 4, 40, B)
    assert value_of(tier, 4) == 4
    save_over(tier, 4, 40, B)
    assert value_of(tier, 4) == 40
