"""One drain at a time, whatever a dead one has left and whoever comes between."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.offline.draining.lock import BELOW, DrainLock
from emergency_ckpt.tiers.ramdisk.owners import this_process
from emergency_ckpt.tiers.storage.directory import StorageDirectory

LONG_S = 60.0
MOST_CALLS = 16


def leave_dead(directory: Path) -> None:
    """Leave the note of a drain that was killed on this host."""
    owner = msgspec.structs.replace(this_process("drain"), born=1)
    note = {"begun_s": time.time(), "owner": msgspec.to_builtins(owner)}
    (directory / BELOW).parent.mkdir(parents=True)
    (directory / BELOW).write_text(json.dumps(note))


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
    """Drains of one directory, and which of them are under way."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.under_way: list[DrainLock] = []

    def begin(self, storage: StorageDirectory | None = None) -> None:
        lock = DrainLock(storage or StorageDirectory(str(self._directory), LONG_S))
        with contextlib.suppress(PersistentTierError):
            self.under_way.append(lock.__enter__())

    def end(self) -> None:
        for lock in self.under_way:
            lock.__exit__()
        self.under_way.clear()

    def begin_end_and_begin(self) -> None:
        """One comes and goes, and another comes."""
        self.begin()
        self.end()
        self.begin()

    def begin_and_end(self) -> None:
        self.begin()
        self.end()


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "none"])
@pytest.mark.parametrize("work", ["begin", "begin_and_end", "begin_end_and_begin"])
def test_drain_lock_beside_another_is_held_by_one(tmp_path: Path, work: str, dead: bool) -> None:
    """Others come before each of the calls of one that begins."""
    for number in range(MOST_CALLS):
        directory = tmp_path / str(number)
        if dead:
            leave_dead(directory)
        drains = Drains(directory)
        storage = Interrupted(directory, number, getattr(drains, work))
        drains.begin(storage)
        storage.left = -1
        assert len(drains.under_way) == 1, f"before call {number}"
        drains.end()
        assert not list((directory / BELOW).parent.iterdir())
        drains.begin()
        assert drains.under_way
        drains.end()
