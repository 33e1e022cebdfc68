"""Processes that save what is announced, over a coordination service in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from memory_coordination import MemoryCoordinator

from emergency_ckpt.background import Failures
from emergency_ckpt.core.save.announcements import Progress
from emergency_ckpt.save import SaveAnnouncements
from emergency_ckpt.save.schedule import Choice
from emergency_ckpt.types import LOCAL, TierName

LONG_S = 30.0
WAIT_S = 0.6
"""For the reports on a save; a fault makes one of them never come."""
STEP_S = 0.004


class Tier:
    """Wants a save whenever none is ahead; each has ended as soon as it has begun."""

    stall_s = 0.0

    def __init__(self) -> None:
        self.ahead = -1
        self.begun = -1, 0.0
        self.wanted = True
        self.again: list[int] = []

    def choose_step(
        self, progress: Progress, first_step: int, lead_s: float, *, others_save: bool
    ) -> Choice | None:
        del lead_s
        if others_save or progress.step <= self.ahead or not self.wanted:
            return None
        return Choice(first_step)

    choose_first = choose_step

    def announced(self, step: int) -> None:
        self.ahead = step

    def announce_again(self, step: int) -> None:
        self.again.append(step)

    def note_stall(self, stall_s: float) -> None:
        del stall_s


class Member:
    """One process: its saves, and those for which it was late."""

    def __init__(self, coordinator: MemoryCoordinator, timeout_s: float = WAIT_S) -> None:
        self.tier = Tier()
        self.failures = Failures()
        self.saved: list[int] = []
        self.missed: list[int] = []
        tiers: dict[TierName, Any] = {LOCAL: self.tier}
        self.announcements = SaveAnnouncements(
            coordinator,
            "announced/0",
            tiers,
            self.failures,
            self._note_missed,
            timeout_s=timeout_s,
        )

    def _note_missed(self, tier: TierName, step: int) -> None:
        assert tier == LOCAL
        self.missed.append(step)

    def arrive(self, step: int) -> None:
        if self.announcements.arrive(step):
            self.saved.append(step)
            self.tier.begun = step, time.monotonic()
            self.announcements.tell_ended(LOCAL, step)


def train(members: list[Member], saves: int) -> None:
    """Step together until the leader has begun ``saves``; then end all threads."""
    deadline_s = time.monotonic() + LONG_S
    step = 0
    while len(members[0].saved) < saves:
        assert time.monotonic() < deadline_s, members[0].saved
        step += 1
        for member in members:
            member.arrive(step)
        time.sleep(STEP_S)
    stop(members)


def train_alone(leader: Member) -> int:
    """Step until the leader has saved; return its last step."""
    step, deadline_s = 0, time.monotonic() + LONG_S
    while not leader.saved:
        assert time.monotonic() < deadline_s
        step += 1
        leader.arrive(step)
        time.sleep(STEP_S)
    return step


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(STEP_S)


def stop(members: list[Member]) -> None:
    for member in members:
        member.announcements.stop()  # which waits for two seconds at most
    wait_until(lambda: all(t.name != "eckpt-announcements" for t in threading.enumerate()))
