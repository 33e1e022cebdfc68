"""Announcements under schedules that a seed draws: `announcement_schedules.py SEEDS [FIRST]`.

Steps, saves and calls of the service are slow, calls lose their effect or their reply, a process
pauses or is killed. Whoever comes to an announced call saves it or says that it was late; the
leader is never late; the threads end; and the keys are bounded. In some schedules the processes
stop together, and then each learns of all that was announced.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import sim
from scheduler import Process
from schedules import run_seeds
from service import Client, Service

STEPS = 60
TIMEOUT_S = 10.0
LONGEST_S = 400.0
LOCAL = "local"


class Tier:
    """Wants a save whenever none is under way; a save takes some time."""

    stall_s = 0.0

    def __init__(self) -> None:
        self.ahead = -1
        self.begun: tuple[int, float | None] = -1, None
        self.is_idle = True
        self.again: list[int] = []

    def choose_step(
        self, progress: Any, first_step: int, lead_s: float, *, others_save: bool
    ) -> Any:
        """Return the next step, unless one is ahead or under way."""
        from emergency_ckpt.save.schedule import Choice  # noqa: PLC0415

        del lead_s
        if others_save or not self.is_idle or progress.step <= self.ahead:
            return None
        return Choice(first_step)

    choose_first = choose_step

    def announced(self, step: int) -> None:
        """``step`` is announced."""
        self.ahead = step

    def announce_again(self, step: int) -> None:
        """A process was late for ``step``."""
        self.again.append(step)

    def note_stall(self, stall_s: float) -> None:
        """Nothing follows from it."""


def run(seed: int) -> Counter[str]:
    """Run one schedule and judge it; return how often each end was seen."""
    from emergency_ckpt.background import Failures  # noqa: PLC0415
    from emergency_ckpt.cluster.coordination import JaxCoordinator  # noqa: PLC0415
    from emergency_ckpt.save.announcements import SaveAnnouncements  # noqa: PLC0415

    draw, scheduler, service = random.Random(seed), sim.begin(seed), Service()
    count, stride = draw.randint(1, 4), draw.choice((1, 1, 10))
    step_s = draw.choice((0.02, 0.3, 2.0))
    slow_s = draw.choice((0.001, 0.02, 1.0))
    lost = draw.choice((0.0, 0.0, 0.01))
    stops_together = draw.random() < 0.5
    service.delay = lambda: slow_s * draw.random() ** 3
    service.fault = lambda operation, key: _fault(draw.random(), lost)
    processes = [Process(f"p{index}", index, None) for index in range(count)]
    if draw.random() < 0.2:
        processes[draw.randrange(count)].calls_left = draw.randrange(60)
    if draw.random() < 0.3:
        frozen = processes[draw.randrange(count)]
        frozen.frozen_until_s = scheduler.now_s + draw.random() * STEPS * step_s
    saved: list[list[int]] = [[] for _ in range(count)]
    missed: list[list[int]] = [[] for _ in range(count)]
    tiers = [Tier() for _ in range(count)]
    failures = [Failures() for _ in range(count)]
    ended: set[int] = set()

    def part_of(me: int) -> None:
        coordinator = JaxCoordinator(Client(service), "job", me, count)
        tier: Any = tiers[me]
        announcements = SaveAnnouncements(
            coordinator,
            "announced/0",
            {LOCAL: tier},
            failures[me],
            lambda _, step: missed[me].append(step),
            timeout_s=TIMEOUT_S,
        )

        def save(step: int) -> None:
            scheduler.sleep(step_s * 2 * scheduler.random.random())
            tier.is_idle, tier.begun = True, (step, scheduler.now_s)
            announcements.tell_ended(LOCAL, step)

        for number in range(1, STEPS + 1):
            scheduler.sleep(step_s * (0.5 + scheduler.random.random()))
            step = number * stride
            if announcements.arrive(step):
                saved[me].append(step)
                if tier.is_idle:  # else it is left out, and the end of the one before tells so
                    tier.is_idle, tier.begun = False, (step, None)
                    scheduler.spawn(processes[me], "save", lambda step=step: save(step))
        announcements.stop(LONGEST_S if stops_together else 0.0)
        ended.add(me)

    for index, process in enumerate(processes):
        scheduler.spawn(process, "training", lambda index=index: part_of(index))
    scheduler.run(lambda: False, 2 * LONGEST_S, 1 << 20)
    assert not scheduler.errors, scheduler.errors
    assert not missed[0], f"the leader was late for {missed[0]}"
    for me, process in enumerate(processes):
        assert me in ended or not process.alive, f"process {me} did not end"
        assert not set(saved[me]) & set(missed[me]), "saved, and said to be missed"
        assert {*saved[me], *missed[me]} <= {*saved[0]}, "a call that was not announced"
        # A service that loses calls may hide an announcement from a process that stops.
        if me in ended and not lost and stops_together:
            assert sorted(saved[me] + missed[me]) == saved[0], f"process {me}: {saved[0]}"
    told = [failure.count for failure in failures]
    assert lost or not any(told), told
    assert len(service.values) <= STEPS + count + 1, sorted(service.values)
    ends = Counter(saved=sum(map(len, saved)), missed=sum(map(len, missed)))
    ends["again"] = len(tiers[0].again)
    return ends


def _fault(number: float, lost: float) -> str:
    if number < lost:
        return "lost"
    return "unheard" if number < 2 * lost else ""


if __name__ == "__main__":
    run_seeds(run, first=1)
