"""Announced steps: each process comes to the same call, in time or late, whatever is slow or lost.

A simulated job: every process steps at a speed of its own; messages take any time or get lost; the
clock of the leader is the only one.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergency_ckpt.core.save.announcements import (
    LONGEST_LEAD_S,
    Announcement,
    Follower,
    Lead,
    Met,
    Progress,
    SaveReport,
    StepClock,
)

TIMEOUT_S = 2.0
FEWER = settings(max_examples=30)
"""An example is some seconds of a job; the simulation of lives announces in thousands."""


@dataclasses.dataclass
class World:
    """How the job behaves. Times in seconds; ``loss``: part of the messages that never arrive."""

    seed: int
    step_times_s: list[float]
    delay_s: float
    loss: float = 0.0
    drift: int | None = 3
    duration_s: float = 20.0


class Job:
    """Runs ``World`` to its end; remembers how each process came to each announced call."""

    def __init__(self, world: World, strides: tuple[int, ...] = (1,)) -> None:
        self.world = world
        self.path = list(itertools.accumulate(itertools.islice(itertools.cycle(strides), 20_000)))
        self.random = random.Random(world.seed)
        self.count = len(world.step_times_s)
        self.followers = [Follower() for _ in range(self.count)]
        self.calls = [0] * self.count
        self.lead = Lead(2)
        self.clock = StepClock()
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.announced: dict[int, Announcement] = {}
        self.announced_s = 0.0
        self.met: dict[int, dict[int, Met]] = {}

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.order), action))

    def run(self) -> Job:
        for process in range(self.count):
            self.at(self.random.random() * self.world.step_times_s[process], self.stepper(process))
        self.at(0.0, self.look)
        while self.queue and self.queue[0][0] < self.world.duration_s:
            self.now_s, _, action = heapq.heappop(self.queue)
            action()
        return self

    def stepper(self, process: int) -> Callable[[], None]:
        def step() -> None:
            self.at(self.world.step_times_s[process], step)
            drift = self.world.drift
            if drift is not None and self.calls[process] >= min(self.calls) + drift:
                return  # a collective holds it up
            self.arrive(process)

        return step

    def arrive(self, process: int) -> None:
        step = self.path[self.calls[process]]
        self.calls[process] += 1
        if process == 0:
            self.clock.arrive(step, self.now_s)
        for met in self.followers[process].arrive(step, self.now_s):
            self.note(process, met)

    def note(self, process: int, met: Met) -> None:
        assert process not in self.met.setdefault(met.announcement.number, {}), "once each"
        self.met[met.announcement.number][process] = met

    def look(self) -> None:
        """At the leader: announce a save when the one before has ended, or takes too long."""
        self.at(0.002, self.look)
        newest = len(self.announced) - 1
        met = self.met.get(newest, {})
        is_over = len(met) == self.count or self.now_s - self.announced_s > TIMEOUT_S
        progress = self.clock.progress
        if progress is None or (newest >= 0 and not is_over):
            return
        if newest >= 0 and 0 in met:
            reports = {process: report(newest, each.spare_s) for process, each in met.items()}
            is_late = self.lead.note(reports.pop(0), reports.values())
            assert is_late == self.is_late(newest)
        step = progress.first_step(self.now_s, self.lead.seconds(is_prompt=True))
        announcement = Announcement(newest + 1, "local", step)
        assert self.followers[0].read(announcement, self.now_s) is None
        self.announced[announcement.number] = announcement
        self.announced_s = self.now_s
        for process in range(1, self.count):
            if self.random.random() >= self.world.loss:
                delay_s = self.random.uniform(0, 2 * self.world.delay_s)
                self.at(delay_s, lambda p=process: self.read(p, announcement))

    def read(self, process: int, announcement: Announcement) -> None:
        late = self.followers[process].read(announcement, self.now_s)
        if late is not None:
            self.note(process, late)

    def is_late(self, number: int) -> bool:
        return any(met.spare_s < 0 for met in self.met.get(number, {}).values())


def report(number: int, spare_s: float) -> SaveReport:
    return SaveReport(number=number, spare_ms=math.floor(1000 * spare_s))


worlds = st.builds(
    World,
    seed=st.integers(0, 2**32),
    step_times_s=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=5),
    delay_s=st.floats(0.0, 0.3),
    loss=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    drift=st.sampled_from([None, 1, 3, 50]),
    duration_s=st.just(3.0),
)


@pytest.mark.dear
@given(worlds, st.sampled_from([(1,), (10,), (1, 7, 30)]))
@FEWER
def test_all_come_to_the_same_call(world: World, strides: tuple[int, ...]) -> None:
    job = Job(world, strides).run()
    for number, met in job.met.items():
        step = job.announced[number].step
        expected = next(each for each in job.path if each >= step)
        assert {each.step for each in met.values()} == {expected}


@pytest.mark.dear
@given(worlds)
@FEWER
def test_known_announcement_is_met_or_ahead(world: World) -> None:
    job = Job(dataclasses.replace(world, loss=0.0)).run()
    last = max(
        (n for n in job.announced if job.announced[n].number < len(job.announced) - 1), default=-1
    )
    for number in range(last):
        for process in range(job.count):
            is_before = job.followers[process].is_ahead(job.announced[number].step)
            assert is_before or process in job.met.get(number, {})


@pytest.mark.dear
@pytest.mark.parametrize(
    ("step_times_s", "delay_s"),
    [
        ([0.001] * 4, 0.002),
        ([0.001] * 4, 0.05),
        ([0.001, 0.001, 0.001, 0.0015], 0.01),
        ([0.05, 0.05, 0.08, 0.05], 0.01),
        ([1.0, 1.0, 1.0, 1.0], 0.01),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_leader_learns_to_announce_early_enough(
    step_times_s: list[float], delay_s: float, seed: int
) -> None:
    duration_s = min(200.0, 1000 * max(0.01, step_times_s[0]))
    job = Job(World(seed, step_times_s, delay_s, drift=5, duration_s=duration_s)).run()
    later = range(10, len(job.announced) - 1)
    assert len(later) >= 20
    assert sum(map(job.is_late, later)) <= 0.03 * len(later)


@pytest.mark.parametrize("step_time_s", [0.5, 10.0])
def test_long_steps_are_not_skipped_without_need(step_time_s: float) -> None:
    """The next step is announced when there is time enough until it begins."""
    progress = Progress(7, 100.0, step_time_s)
    assert progress.first_step(100.0, 0.1) == 8
    assert progress.first_step(100.0 + step_time_s - 0.05, 0.1) == 9


def read(follower: Follower, *announcements: Announcement, at_s: float = 0.0) -> list[Met | None]:
    return [follower.read(each, at_s) for each in announcements]


def test_step_between_two_calls_is_saved_at_the_later_one() -> None:
    follower = Follower()
    follower.arrive(10, 1.0)
    announcement = Announcement(0, "local", 11)
    assert read(follower, announcement, at_s=1.5) == [None]
    assert follower.arrive(20, 2.0) == (Met(announcement, 20, 0.5),)
    assert follower.arrive(30, 3.0) == ()


def test_late_process_names_the_call_that_it_missed() -> None:
    follower = Follower()
    for number, step in enumerate((10, 20, 30, 40)):
        follower.arrive(step, float(number))
    announcement = Announcement(0, "local", 15)
    assert read(follower, announcement, at_s=5.0) == [Met(announcement, 20, -4.0)]
    assert follower.arrive(50, 6.0) == ()


def test_exact_step_that_was_jumped_over_is_not_saved() -> None:
    follower = Follower()
    follower.arrive(1, 0.0)
    assert read(follower, Announcement(0, "local", 5, exact=True)) == [None]
    assert follower.arrive(9, 1.0) == ()
    assert read(follower, Announcement(1, "local", 5, exact=True)) == [None]
    assert follower.arrive(10, 2.0) == ()


def test_call_that_is_long_forgotten_is_not_named() -> None:
    follower = Follower()
    for step in range(5000):
        follower.arrive(step, 0.0)
    assert read(follower, Announcement(0, "local", 5)) == [None]
    assert read(follower, Announcement(1, "local", 4999)) != [None]


def test_calls_of_a_loop_that_went_back_are_others() -> None:
    follower = Follower()
    for step in (30, 40, 10, 20, 30):
        follower.arrive(step, 0.0)
    (late,) = read(follower, Announcement(0, "local", 20))
    assert late is not None
    assert late.step == 20


def note(lead: Lead, span_s: float, spare_s: float) -> bool:
    """All come to an announced call, the slowest after ``spare_s``; return whether it was late."""
    return lead.note(report(7, span_s), [report(7, span_s), report(7, spare_s)])


def test_lead_is_bounded() -> None:
    lead = Lead(2)
    for _ in range(40):
        assert note(lead, 1.0, -500.0)
    assert lead.seconds(is_prompt=True) == LONGEST_LEAD_S


def test_report_on_another_announcement_teaches_nothing() -> None:
    lead = Lead(2)
    usual_s = lead.seconds(is_prompt=True)
    assert not lead.note(report(8, 1.0), [report(7, -9.0)])
    assert lead.seconds(is_prompt=True) == usual_s


def test_process_that_is_late_by_less_than_a_millisecond_is_late() -> None:
    assert note(Lead(2), 0.1, -0.0001)


@pytest.mark.parametrize(("count", "least_s"), [(4, 0.5), (10_000, 10.0)])
def test_announcement_after_a_quiet_time_comes_farther_ahead(count: int, least_s: float) -> None:
    """The processes look for it at intervals by then."""
    lead = Lead(count)
    for _ in range(100):
        assert not note(lead, 0.002, 0.001)
    assert lead.seconds(is_prompt=True) < 0.1
    assert lead.seconds(is_prompt=False) >= least_s


def test_process_on_its_own_needs_no_lead() -> None:
    assert Lead(1).seconds(is_prompt=False) == 0.0


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pause_s", [1.0, 10.0])
def test_one_pause_does_not_cost_much_more_than_its_length(is_late: bool, pause_s: float) -> None:
    """A save takes a lead at least: the lead must come down soon after one slow process."""
    lead = Lead(2)
    for _ in range(40):
        note(lead, 0.006, 0.004)
    usual_s = lead.seconds(is_prompt=True)
    assert (
        note(lead, 0.006 if is_late else 2 * pause_s, pause_s * (-1 if is_late else 1)) == is_late
    )
    lost_s = 0.0
    while lead.seconds(is_prompt=True) > 4 * usual_s:
        lost_s += lead.seconds(is_prompt=True)
        note(lead, 0.006, 0.004)
    assert lost_s <= 12 * pause_s


@pytest.mark.dear
@pytest.mark.parametrize("strides", [(1,), (10,), (100,), (1, 7, 30)])
def test_saves_do_not_become_fewer_when_steps_are_further_apart(strides: tuple[int, ...]) -> None:
    world = World(7, [0.01] * 3, 0.004, duration_s=5.0)
    usual = len(Job(world).run().met)
    assert len(Job(world, strides).run().met) > 0.8 * usual


def test_clock_starts_afresh_when_steps_go_back() -> None:
    clock = StepClock()
    clock.arrive(1, 0.0)
    assert clock.progress is None
    clock.arrive(3, 1.0)
    clock.arrive(3, 1.25)  # as of ``should_save`` after ``save``
    assert clock.progress == Progress(3, 1.0, 0.5, 2, (1, 3))
    clock.arrive(2, 5.0)
    assert clock.progress is None
