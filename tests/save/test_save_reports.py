"""What a process reports at the end of a save, and in which tiers a step is due by announcement."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial

import pytest

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster import LocalCoordinator
from emergency_ckpt.config.policies import plan_saves
from emergency_ckpt.save.announcements import DueSaves
from emergency_ckpt.save.schedule import TierSchedule

LONG_S = 30.0


@pytest.mark.parametrize(("is_left_out", "reported"), [(False, 10), (True, 20)])
def test_save_that_waits_for_its_turn_is_not_over(is_left_out: bool, reported: int) -> None:
    schedule, ends = TierSchedule("local", plan_saves(10), Failures()), threading.Event()
    told: list[int] = []
    schedule.begin_reports(told.append)
    schedule.note_due(10)
    schedule.start(partial(_wait_for, ends))
    schedule.note_due(20)
    if is_left_out:
        schedule.leave_out(20, lambda: None)
    ends.set()
    assert schedule.worker.wait_idle(LONG_S)
    assert told == [reported]
    assert schedule.worker.stop(LONG_S)


def test_save_left_out_after_the_report_is_reported_too() -> None:
    """The thread of the saves has reported the end of its save, and is not idle yet."""
    schedule = TierSchedule("local", plan_saves(10), Failures())
    told: list[int | str] = []

    def report(step: int) -> None:
        told.append(step)
        if step == 10:
            schedule.leave_out(20, lambda: told.append("the others"))

    schedule.begin_reports(report)
    schedule.note_due(10)
    schedule.start(lambda: None)
    assert schedule.worker.wait_idle(LONG_S)
    assert told == [10, "the others", 20]
    assert schedule.worker.stop(LONG_S)


def test_step_due_by_a_rule_is_not_announced() -> None:
    """No process can be late for it."""
    schedule = TierSchedule("local", plan_saves([10, timedelta(milliseconds=1)]), Failures())
    due = DueSaves(
        {"local": schedule}, LocalCoordinator(), Failures(), lambda *_: None, timeout_s=LONG_S
    )
    step, announced = 0, set[int]()
    deadline_s = time.monotonic() + LONG_S
    while step < 50 or not announced:
        assert time.monotonic() < deadline_s
        step += 1
        time.sleep(0.005)
        if due.take(step, force=False, preempted=False):
            schedule.note_due(step)
            schedule.note_started(step, 0.0)
            if due.announced:
                announced.add(step)
            assert bool(due.announced) is (step % 10 != 0)
    due.stop(LONG_S)
    assert schedule.worker.stop(LONG_S)
    assert announced


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LONG_S)
