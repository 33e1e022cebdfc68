"""Two drains of one run at once: who has the claim ends its work, whatever the other still does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from drains import Drains

from emergency_ckpt.errors import CheckpointError, DirectoryInUse
from emergency_ckpt.storage import DirectoryWriter, array_writes, step_writer
from emergency_ckpt.storage.array_writes import ArrayWrites
from emergency_ckpt.storage.step_writer import StepWriter
from emergency_ckpt.tools.draining.drain import Drained, drain
from emergency_ckpt.tools.survey.places import Places

WAIT_S = 60.0
REPLACED, NEWER = "the drain that is replaced", "the newer drain"


class Turns:
    """Points that threads wait for, by name."""

    def __init__(self) -> None:
        self._passed: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> threading.Event:
        with self._lock:
            return self._passed.setdefault(name, threading.Event())

    def wait(self, name: str) -> None:
        assert self[name].wait(WAIT_S), name


def around(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    before: Callable[[str, int], None],
    after: Callable[[str, int], None],
) -> None:
    """Call ``before`` and ``after`` with the drain and the number of its call of a method."""
    method, calls = getattr(owner, name), dict[str, int]()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Calls of storage are made in threads of their own.
        thread = getattr(self, "drain", threading.current_thread().name)
        calls[thread] = number = calls.get(thread, 0) + 1
        before(thread, number)
        try:
            return method(self, *args, **kwargs)
        finally:
            after(thread, number)

    monkeypatch.setattr(owner, name, called)


class NamedWrites(ArrayWrites):
    """The writes of a step, which know the drain that they are of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drain = threading.current_thread().name


class NamedStepWriter(StepWriter):
    @property
    def drain(self) -> str:
        assert isinstance(self._writes, NamedWrites)
        return self._writes.drain


def pass_by(thread: str, number: int) -> None:
    del thread, number


def unseen(_what: str, _total_bytes: int) -> Callable[[int], None]:
    """Show no progress."""
    return lambda _: None


def test_drain_survives_the_one_that_it_replaces(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one comes to clear the place when the newer one has taken it: it does not."""
    drains.save(5)
    left = drains.world.persistent / "host_state" / "5"  # by a drain that was killed
    left.mkdir(parents=True)
    places = Places(
        directory=str(drains.world.persistent), local_dirs=(drains.world.ramdisk,), run_id=None
    )
    outcomes: dict[str, Drained | CheckpointError] = {}
    turns = Turns()

    def run() -> None:
        try:
            outcome: Drained | CheckpointError = drain(places, unseen, 60.0)
        except CheckpointError as error:
            outcome = error
        outcomes[threading.current_thread().name] = outcome

    newer = threading.Thread(target=run, name=NEWER)

    def before_clearing(thread: str, number: int) -> None:
        if (thread, number) == (REPLACED, 1):
            newer.start()
            turns.wait("newer has taken the place 1")

    def after_clearing(thread: str, number: int) -> None:
        if (thread, number) == (REPLACED, 1):
            turns["place cleared"].set()

    def after_taking(thread: str, number: int) -> None:
        turns[f"{'newer' if thread == NEWER else 'older'} has taken the place {number}"].set()
        if thread == NEWER:
            turns.wait("place cleared")

    monkeypatch.setattr(array_writes, "ArrayWrites", NamedWrites)
    monkeypatch.setattr(step_writer, "StepWriter", NamedStepWriter)
    around(monkeypatch, DirectoryWriter, "_clear", before_clearing, after_clearing)
    around(monkeypatch, StepWriter, "_claim", pass_by, after_taking)
    replaced = threading.Thread(target=run, name=REPLACED)
    replaced.start()
    replaced.join(WAIT_S)
    newer.join(WAIT_S)
    assert isinstance(outcomes[REPLACED], DirectoryInUse)
    written = outcomes[NEWER]
    assert isinstance(written, Drained), written
    assert (written.step, written.is_written) == (5, True)
    assert not turns["newer has taken the place 2"].is_set()
    assert not turns["older has taken the place 1"].is_set()
    assert drains.restored_from_storage() == (5, 50)
