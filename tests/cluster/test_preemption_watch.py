"""Notices: seen once, at one step, on all processes alike, also after steps have jumped."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.preemption import PreemptionWatch
from emergency_ckpt.cluster.round import run_on_all
from emergency_ckpt.errors import RamdiskFull


class SyncManager:
    """JAX's rule: yes at the number after the highest that any process had when it came."""

    def __init__(self) -> None:
        self.highest = 0
        self.sync: int | None = None

    def notice(self) -> None:
        if self.sync is None:
            self.sync = self.highest + 1


class Notices:
    def __init__(self, manager: SyncManager) -> None:
        self.manager = manager
        self.last_number = 0
        self.noticed_s = time.monotonic()

    def reached(self, number: int) -> bool:
        self.last_number = number
        self.manager.highest = max(self.manager.highest, number)
        return number == self.manager.sync

    def notice(self) -> None:
        self.manager.notice()

    def close(self) -> None:
        pass


def watches(count: int) -> tuple[SyncManager, list[PreemptionWatch]]:
    manager = SyncManager()
    return manager, [PreemptionWatch(Notices(manager), grace_s=60.0) for _ in range(count)]


def agree(
    found: list[PreemptionWatch], work: Callable[[int], object] = lambda _: None
) -> list[object]:
    """``run_on_all`` on all; what each returned or raised."""
    service = MemoryService(len(found))

    def go_on(process: int) -> object:
        member, watch = service.member(process), found[process]
        return run_on_all(member, "ready", lambda: work(process), watch, 10.0)

    return everywhere(len(found), go_on)


def test_failure_on_one_is_known_to_all_and_numbers_are_agreed() -> None:
    manager, found = watches(3)
    found[2].reached(1)
    found[2].reached(2)

    def work(process: int) -> None:
        if process == 1:
            raise RamdiskFull("reserve", "slots", "no room")

    outcomes = agree(found, work)
    assert isinstance(outcomes[1], RamdiskFull)
    assert outcomes[0] == outcomes[2] == f"process 1: {outcomes[1]}"
    for watch in found:
        watch.reached(50)
    assert manager.highest == 3, "all went on from the highest number, 2"


def test_all_act_at_one_step() -> None:
    manager, found = watches(3)
    assert agree(found) == [""] * 3
    for watch in found:
        assert [watch.reached(step) for step in (101, 102)] == [False, False]
    assert not found[0].reached(103)
    manager.notice()
    assert not found[1].reached(103)
    assert not found[2].reached(103)
    assert [watch.reached(104) for watch in found] == [True] * 3
    assert [watch.sync_step for watch in found] == [104] * 3
    assert all(0 < watch.grace_left_s() <= 60 for watch in found)
    assert found[0].reached(105), "from then on"


def test_asking_again_about_a_step_changes_nothing() -> None:
    manager, (watch,) = watches(1)
    agree([watch])
    assert [watch.reached(7) for _ in range(5)] == [False] * 5
    assert manager.highest == 1


@pytest.mark.parametrize("steps_before", [0, 4])
def test_notice_during_restore_is_seen_at_first_step_after_it(steps_before: int) -> None:
    """The processes had got differently far, and go on from a step far from there."""
    manager, found = watches(2)
    agree(found)
    for process, watch in enumerate(found):
        for step in range(1, steps_before + process):
            watch.reached(step)
    manager.notice()
    agree(found)
    assert [watch.reached(41) for watch in found] == [True, True]


def test_without_a_source_no_notice_is_heeded() -> None:
    watch = PreemptionWatch(None, grace_s=1.0)
    agree([watch])
    assert not watch.reached(1)
