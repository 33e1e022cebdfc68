"""Commits of arrays that TensorStore ends later than the save that began them."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emergency_ckpt.storage.array_writes import ArrayWrites
from emergency_ckpt.storage.step_writer import StepWriter

LONG_S = 60.0
_F_OFD_SETLK = 37  # Linux; older versions of Python do not define it


class HeldCommit:
    """The next commit of a database of arrays: it waits for the lock of its manifest, held here."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._locks: list[int] = []
        self._transactions: list[Any] = []
        self._writes: list[ArrayWrites] = []
        self._is_begun = threading.Event()
        begin = ArrayWrites._begin

        def begin_and_lock(own: ArrayWrites, database: Any, *args: Any) -> None:
            begin(own, database, *args)
            self._writes.append(own)
            self._transactions.append(database.transaction)
            self._locks.append(_locked(Path(database.base.path) / "manifest.ocdbt.__lock"))
            self._is_begun.set()

        self._patch.setattr(ArrayWrites, "_begin", begin_and_lock)

    def give_up(self) -> None:
        """Cancel the save once TensorStore waits for the lock, with all else written.

        Before that it would make the folder again while the next save makes room there.
        """
        assert self._is_begun.wait(LONG_S)
        deadline_s = time.monotonic() + LONG_S
        while not all(map(_is_waited_for, self._locks)):
            assert time.monotonic() < deadline_s, Path("/proc/locks").read_text()
            time.sleep(0.005)
        self._patch.undo()
        self._writes[0].cancel()

    def end(self) -> None:
        """Let TensorStore go on, and wait until it has ended."""
        for fd in self._locks:
            os.close(fd)
        for transaction in self._transactions:
            transaction.future.exception()


def _is_waited_for(fd: int) -> bool:
    """Return True when the kernel has a waiter for the lock of the open file."""
    inode = f":{os.fstat(fd).st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and inode in line for line in lines)


def _locked(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def at_merge(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Do ``work`` once the arrays of the next save are written, before databases are merged."""
    check, works = StepWriter._check_others, [work]

    def work_and_check(own: StepWriter) -> None:
        while works:
            works.pop()()
        check(own)

    monkeypatch.setattr(StepWriter, "_check_others", work_and_check)
