"""Two drains of one dead life: the step is whole, and who was replaced is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from persistent_steps import POINTS, RUN_ID, complete_steps, life, save_over, value_of, writer_of

from emergency_ckpt.errors import DirectoryInUse, PersistentTierError
from emergency_ckpt.storage import DirectoryWriter, PersistentTier, StorageDirectory
from emergency_ckpt.storage.steps import StoredSteps
from emergency_ckpt.types import SaveId

LONG_S = 60.0
MOST_CALLS = 24
STEP = 5


def drain(directory: Path, name: str, value: int, at: Callable[[str], None]) -> None:
    """Write the step as ``eckpt drain`` does, with values that say which drain it was."""
    tier = PersistentTier(str(directory))
    writer = writer_of(tier, writer=name)
    writer.begin(life(2))
    if not writer.has(SaveId(STEP, life(2), RUN_ID)):
        save_over(tier, STEP, value, life(2), writer=writer, at=at)


def nothing(point: str) -> None:
    del point


@pytest.mark.parametrize("before", [True, False], ids=["saved", "empty"])
@pytest.mark.parametrize("point", POINTS)
def test_drain_replaced_at_any_point_leaves_one_whole_step(
    tmp_path: Path, point: str, before: bool
) -> None:
    """Another comes and ends meanwhile; the first ends with an error, unless it was done.

    A drain that finds the step there, or its markers, writes nothing.
    """
    if before:
        save_over(PersistentTier(str(tmp_path)), 2, 2, life(1))

    def come(at: str) -> None:
        if at == point:
            drain(tmp_path, "second", 7, nothing)

    if point == "published":
        drain(tmp_path, "first", 1, come)
    else:
        with pytest.raises(PersistentTierError):
            drain(tmp_path, "first", 1, come)
    tier = PersistentTier(str(tmp_path))
    assert complete_steps(tier) == ([2, STEP] if before else [STEP])
    left = 1 if point in ("marked", "published", "settled") else 7
    assert value_of(tier, STEP) == left
    drain(tmp_path, "third", 8, nothing)
    assert value_of(tier, STEP) == left


class Interrupted(StorageDirectory):
    """A directory before whose n-th call something else happens."""

    def __init__(self, directory: Path, number: int, work: Callable[[], None]) -> None:
        super().__init__(str(directory), LONG_S)
        self.left = number
        self._work = work

    def do(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            self._work()
        return super().do(*args, **kwargs)


class Drains:
    """Drains of one directory that have begun; ``under_way``: those that may still write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begun: list[DirectoryWriter] = []

    def begin(self, storage: StorageDirectory | None = None) -> None:
        storage = storage or StorageDirectory(str(self._directory), LONG_S)
        name = f"drain-{len(self._begun)}-{id(storage)}"
        writer = DirectoryWriter(
            storage, StoredSteps(storage), run_id=RUN_ID, from_dir=False, writer=name
        )
        with contextlib.suppress(DirectoryInUse):
            writer.begin(life(2))
            self._begun.append(writer)

    def begin_twice(self) -> None:
        self.begin()
        self.begin()

    def under_way(self) -> int:
        begun, self._begun = self._begun, []
        for writer in begun:
            with contextlib.suppress(DirectoryInUse):  # that ends a drain
                writer.check()
                self._begun.append(writer)
        return len(self._begun)


@pytest.mark.dear
@pytest.mark.parametrize("dead", [True, False], ids=["dead", "none"])
@pytest.mark.parametrize("work", ["begin", "begin_twice"])
def test_claim_beside_others_is_held_by_one_drain(tmp_path: Path, work: str, dead: bool) -> None:
    """Others come before each of the calls of one that begins; one had died there before."""
    is_over = False
    for number in range(MOST_CALLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        if dead:
            writer_of(PersistentTier(str(directory)), writer="dead").begin(life(2))
        drains = Drains(directory)
        storage = Interrupted(directory, number, getattr(drains, work))
        drains.begin(storage)
        is_over = storage.left >= 0
        storage.left = -1
        assert drains.under_way() == 1, f"before call {number}"
        drains.begin()
        assert drains.under_way() == 1
    assert is_over, "there were more calls"
