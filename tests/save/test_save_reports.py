"""What a process reports at the end of a save: the step up to which its saves are over."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from emergency_ckpt.background import Failures
from emergency_ckpt.config.policies import plan_saves
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
        schedule.note_left_out(20)
    ends.set()
    assert schedule.worker.wait_idle(LONG_S)
    assert told == [reported]
    assert schedule.worker.stop(LONG_S)


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LONG_S)
