"""A save, a removal or a rollback on a disk that ends at any change: all that counts is whole.

What ends there is repeated from the log by the next life.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
import pytest
from ended_changes import CHANGED
from persistent_steps import RUN_ID, complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.core.timeline import continued
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId

pytestmark = pytest.mark.dear

STEPS = [2, 4, 6]
BACK_TO_2 = continued(None, SaveId(2, life(1), RUN_ID), life(2))


class Seen(NamedTuple):
    """A directory in which something has ended.

    Attributes:
      ours, then: the steps that counted, and that count after the start of the next life.
      plain, plain_then: those of plain Orbax.
      names: of folders after the start of the next life, here and below ``host_state``.
    """

    directory: Path
    tier: PersistentTier
    ours: list[int]
    plain: list[int]
    then: list[int]
    plain_then: list[int]
    names: set[str]


def plain_steps(directory: Path) -> list[int]:
    """The steps of plain Orbax, each read as it does."""
    with ocp.CheckpointManager(directory) as manager:
        found = sorted(manager.all_steps())
        for step in found:
            read = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
            assert read.state["w"].tolist() == [step] * 4
    return found


def ended_everywhere(tmp_path: Path, work: Callable[[PersistentTier], object]) -> list[Seen]:
    """What is seen of ``work`` that ends after k changes, for each k until it is through."""
    before = tmp_path / "before"
    tier, found = PersistentTier(str(before)), list[Seen]()
    writer = writer_of(tier)
    for step in STEPS:
        save_over(tier, step, step, life(1), writer=writer)
    is_through = False
    while not is_through:
        directory = tmp_path / str(len(found))
        shutil.copytree(before, directory)
        with CHANGED.end_after(directory, len(found)):
            try:
                work(PersistentTier(str(directory)))
            except CheckpointError:
                assert CHANGED.left < 0
        is_through = CHANGED.left >= 0
        found.append(look(directory))
    return found


def look(directory: Path) -> Seen:
    tier = PersistentTier(str(directory))
    ours, plain = complete_steps(tier), plain_steps(directory)
    for step in ours:
        assert value_of(tier, step) == step
    writer_of(tier).begin(life(3))
    names = {path.name for path in directory.iterdir()}
    names |= {path.name for path in (directory / "host_state").iterdir()}
    seen: Any = (directory, tier, ours, plain, complete_steps(tier), plain_steps(directory), names)
    table = tier.found.log.read().table
    assert table is not None
    assert not [e for e in table.steps if e.pending or e.state == "removing"]
    return Seen(*seen)


def names_of(*steps: int) -> set[str]:
    return {"host_state", "log", *map(str, steps)}


def test_removal_ending_at_any_change_is_done_or_not(tmp_path: Path) -> None:
    def remove(tier: PersistentTier) -> None:
        writer_of(tier).remove([4], life(2))

    found = ended_everywhere(tmp_path, remove)
    assert len(found) > 10
    counted = [4 in seen.ours for seen in found]
    assert counted == sorted(counted, reverse=True)
    assert (counted[0], counted[-1]) == (True, False)
    for seen in found:
        left = STEPS if 4 in seen.ours else [2, 6]
        assert seen.ours == seen.then == seen.plain_then == left
        assert set(seen.plain) >= set(left)
        assert seen.names == names_of(*left), "nothing of it is left"


def test_rollback_ending_at_any_change_keeps_every_step(tmp_path: Path) -> None:
    def roll_back(tier: PersistentTier) -> None:
        writer_of(tier).begin(life(2), BACK_TO_2)

    found = ended_everywhere(tmp_path, roll_back)
    assert len(found) > 10
    counted = [seen.ours for seen in found]
    assert counted == [STEPS] * counted.count(STEPS) + [[2]] * counted.count([2])
    assert counted[0] == STEPS
    for seen in found:
        assert seen.ours == seen.then == seen.plain_then
        asides = {f"{step}.rolled-back-{life(1)}" for step in set(STEPS) - set(seen.ours)}
        assert seen.names == names_of(*seen.ours) | asides
        for step in STEPS:
            assert value_of(seen.tier, step) == step, "it is served by its number"


def test_save_ending_at_any_change_is_there_or_not(tmp_path: Path) -> None:
    def save(tier: PersistentTier) -> None:
        save_over(tier, 8, 8, life(2))

    found = ended_everywhere(tmp_path, save)
    assert len(found) > 10
    counted = [8 in seen.ours for seen in found]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (False, True)
    for seen in found:
        steps = [*STEPS, 8] if 8 in seen.ours else STEPS
        assert seen.ours == seen.then == seen.plain_then == steps
        assert seen.names == names_of(*steps), "nothing of it is left"
        save_over(seen.tier, 8, 80, life(3))
        assert value_of(seen.tier, 8) == 80


def test_removal_of_a_step_aside_ending_at_any_change(tmp_path: Path) -> None:
    """As a user asks for it: the step that has its number stays as it is."""
    keys = [(4, life(1)), (6, life(1))]

    def discard(tier: PersistentTier) -> None:
        with CHANGED.paused():
            save_over(tier, 4, 4, life(2), chain=BACK_TO_2)
        writer_of(tier).discard_aside(keys, life(2))

    for seen in ended_everywhere(tmp_path, discard):
        assert seen.ours == seen.then == seen.plain == seen.plain_then == [2, 4]
        asides = {name for name in seen.names if "rolled-back" in name}
        assert seen.names - asides == names_of(2, 4)
        kept = {f"{step}.rolled-back-{incarnation}" for step, incarnation in keys}
        assert asides in (set(), kept)
