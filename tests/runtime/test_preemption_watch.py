"""Notices: seen once, at one step, on all processes alike, also after steps have jumped."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from emergency_ckpt.runtime.coordination import LocalCoordinator
from emergency_ckpt.runtime.preemption import PreemptionWatch, SignalNotices
from emergency_ckpt.testing.memory_coordination import MemoryService


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

    def reached(self, number: int) -> bool:
        self.last_number = number
        self.manager.highest = max(self.manager.highest, number)
        return number == self.manager.sync

    def close(self) -> None:
        pass


def watches(count: int) -> tuple[SyncManager, list[PreemptionWatch]]:
    manager, service = SyncManager(), MemoryService(count)
    return manager, [
        PreemptionWatch(service.member(p), Notices(manager), grace_s=5.0) for p in range(count)
    ]


def agree(found: list[PreemptionWatch], name: str) -> None:
    threads = [threading.Thread(target=w.agree_numbers, args=(name, 10.0)) for w in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_act_at_one_step() -> None:
    manager, found = watches(3)
    agree(found, "start")
    for watch in found:
        assert [watch.reached(step) for step in (101, 102)] == [False, False]
    assert not found[0].reached(103)
    manager.notice()
    assert not found[1].reached(103)
    assert not found[2].reached(103)
    assert [watch.reached(104) for watch in found] == [True] * 3
    assert [watch.sync_step for watch in found] == [104] * 3
    assert all(0 < watch.grace_left_s() <= 5 for watch in found)
    assert found[0].reached(105), "from then on"


def test_asking_again_about_a_step_changes_nothing() -> None:
    manager, (watch,) = watches(1)
    watch.agree_numbers("start", 1.0)
    assert [watch.reached(7) for _ in range(5)] == [False] * 5
    assert manager.highest == 1


@pytest.mark.parametrize("steps_before", [0, 4])
def test_a_notice_during_a_restore_is_seen_at_the_first_step_after_it(steps_before: int) -> None:
    """The processes had got differently far, and go on from a step far from there."""
    manager, found = watches(2)
    agree(found, "start")
    for process, watch in enumerate(found):
        for step in range(1, steps_before + process):
            watch.reached(step)
    manager.notice()
    agree(found, "restore")
    assert [watch.reached(41) for watch in found] == [True, True]


def test_without_a_source_no_notice_is_heeded() -> None:
    watch = PreemptionWatch(LocalCoordinator(), None, grace_s=1.0)
    watch.agree_numbers("start", 1.0)
    assert not watch.reached(1)


def test_sigterm_of_a_process_on_its_own() -> None:
    notices = SignalNotices()
    try:
        assert not notices.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert notices.reached(2)
        assert not notices.reached(3)
    finally:
        notices.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_is_left_alone() -> None:
    def handler(signum: int, frame: object) -> None:
        del signum, frame

    signal.signal(signal.SIGTERM, handler)
    try:
        SignalNotices().close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
