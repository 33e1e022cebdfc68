"""The agreement on steps: whatever is slow or lost, all save a step or nobody does.

A simulated job: every process steps at a speed of its own; messages take any time or get lost; the
clock of the leader is the only one.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergency_ckpt.core.save.step_agreement import (
    FIRST_LEAD_S,
    LONGEST_LEAD_S,
    Answer,
    Decision,
    Due,
    Follower,
    Leader,
    Progress,
    Proposal,
    StepClock,
)

TIMEOUT_S = 2.0
FEWER = settings(max_examples=30)
"""An example is 20 s of a job; the simulation of lives runs the same agreement in thousands."""


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
    """Runs ``World`` to its end; remembers who took a snapshot, and what became of it."""

    def __init__(self, world: World, strides: tuple[int, ...] = (1,)) -> None:
        self.world = world
        self.path = list(itertools.accumulate(itertools.islice(itertools.cycle(strides), 20_000)))
        self.begun: dict[int, set[int]] = {}
        self.random = random.Random(world.seed)
        self.count = len(world.step_times_s)
        self.followers = [Follower() for _ in range(self.count)]
        self.steps = [0] * self.count
        self.calls = [0] * self.count
        self.leader = Leader(self.count, TIMEOUT_S)
        self.clock = StepClock()
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.proposals: dict[int, Proposal] = {}
        self.words: dict[int, Decision] = {}
        self.answers: dict[int, dict[int, Answer]] = {}
        self.heard: list[dict[int, bool]] = [{} for _ in range(self.count)]
        self.snapshots: dict[int, dict[int, bool]] = {}
        self.open: Proposal | None = None

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.order), action))

    def send(self, action: Callable[[], None]) -> None:
        if self.random.random() >= self.world.loss:
            self.at(self.random.uniform(0, 2 * self.world.delay_s), action)

    def run(self) -> Job:
        for process in range(self.count):
            self.at(self.random.random() * self.world.step_times_s[process], self.stepper(process))
        self.at(0.0, self.lead)
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
        self.steps[process] = step
        if process == 0:
            self.clock.arrive(step, self.now_s)
        for due in self.followers[process].arrive(step):
            assert self.proposals[due.number].step <= step
            self.begun.setdefault(due.number, set()).add(step)
            self.snapshots.setdefault(due.number, {})[process] = due.confirmed

    def lead(self) -> None:
        self.at(0.002, self.lead)
        progress = self.clock.progress
        if progress is None:
            return
        if self.open is None:
            step = self.leader.first_step(progress, self.now_s)
            proposal = self.open = self.leader.propose("local", step, self.now_s)
            self.proposals[proposal.number] = proposal
            own = self.followers[0].offer(proposal, ready=True)
            if own.kind != "accepted":
                self.leader.withdraw(self.now_s)
                self.open = None
                return
            self.answers[proposal.number] = {0: own}
            for process in range(1, self.count):
                self.send(lambda p=process: self.receive(p, proposal))
            return
        number = self.open.number
        decision = self.leader.decide(self.answers[number], self.steps[0], self.now_s)
        if decision is None:
            return
        self.open = None
        self.words[number] = decision
        self.on_decision(0, number, decision)
        for process in range(1, self.count):
            self.send(lambda p=process: self.on_decision(p, number, decision))

    def receive(self, process: int, proposal: Proposal) -> None:
        answer = self.followers[process].offer(proposal, ready=True)
        self.send(lambda: self.answers[proposal.number].__setitem__(process, answer))

    def on_decision(self, process: int, number: int, decision: Decision) -> None:
        self.followers[process].on_decision(number, confirmed=decision.confirmed)
        self.heard[process][number] = decision.confirmed

    def saved(self, number: int) -> set[int]:
        """Who saves, or would: it has a snapshot and no word of no."""
        took = self.snapshots.get(number, {})
        return {p for p in took if self.heard[p].get(number, True)}


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
@given(worlds)
@FEWER
def test_step_is_saved_by_all_if_confirmed_else_by_none(
    world: World,
) -> None:
    job = Job(world).run()
    for number, decision in job.words.items():
        step = job.proposals[number].step
        passed = {p for p in range(job.count) if job.steps[p] >= step}
        if decision.confirmed:
            assert passed <= set(job.snapshots.get(number, {}))
            assert job.saved(number) == passed
        else:
            in_doubt = {p for p in range(job.count) if number not in job.heard[p]}
            assert job.saved(number) <= in_doubt


@given(worlds)
@FEWER
def test_without_losses_nothing_is_saved_by_some_only(world: World) -> None:
    job = Job(dataclasses.replace(world, loss=0.0)).run()
    settled = [n for n, p in job.proposals.items() if min(job.steps) >= p.step]
    for number in settled:
        heard_by_all = all(number in heard for heard in job.heard)
        if heard_by_all:
            assert job.saved(number) in (set(), set(range(job.count)))


@pytest.mark.dear
@given(worlds)
@FEWER
def test_same_input_gives_the_same_saves(world: World) -> None:
    assert Job(world).run().snapshots == Job(world).run().snapshots


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
def test_it_learns_to_propose_early_enough(
    step_times_s: list[float], delay_s: float, seed: int
) -> None:
    """After the first few, next to no proposal is refused, and few snapshots are dropped."""
    duration_s = min(200.0, 1000 * max(0.01, step_times_s[0]))
    world = World(seed, step_times_s, delay_s, drift=5, duration_s=duration_s)
    job = Job(world).run()
    later = [decision.confirmed for number, decision in job.words.items() if number >= 10]
    assert len(later) >= 20
    assert sum(later) >= 0.97 * len(later)
    dropped = [
        n for n, decision in job.words.items() if not decision.confirmed and n in job.snapshots
    ]
    assert len(dropped) <= 0.01 * len(job.words) + 2


@pytest.mark.parametrize("step_time_s", [0.5, 10.0])
def test_long_steps_are_not_skipped_without_need(step_time_s: float) -> None:
    """The next step is proposed when there is time enough until it begins."""
    leader = Leader(4, TIMEOUT_S)
    assert leader.first_step(Progress(7, 100.0, step_time_s), 100.0) == 8
    late_s = 100.0 + step_time_s - FIRST_LEAD_S / 2
    assert leader.first_step(Progress(7, 100.0, step_time_s), late_s) == 9


def test_process_that_has_passed_the_step_is_late() -> None:
    follower = Follower()
    follower.arrive(10)
    assert follower.offer(Proposal(0, "local", 10), ready=True).kind == "late"
    assert follower.offer(Proposal(1, "local", 11), ready=False).kind == "busy"
    assert follower.offer(Proposal(2, "local", 11), ready=True) == Answer("accepted", 10)
    assert follower.arrive(11) == (Due("local", 2, False),)
    assert follower.arrive(12) == ()


def test_word_decides_until_the_step_is_reached() -> None:
    follower = Follower()
    follower.arrive(1)
    for number, tier in enumerate(("local", "persistent", "local")):
        follower.offer(Proposal(number, tier, 5), ready=True)
    follower.on_decision(0, confirmed=True)
    follower.on_decision(2, confirmed=False)
    assert follower.arrive(5) == (Due("local", 0, True), Due("persistent", 1, False))


def test_step_that_was_jumped_over_is_not_saved() -> None:
    follower = Follower()
    follower.arrive(1)
    follower.offer(Proposal(0, "local", 5, exact=True), ready=True)
    assert follower.arrive(9) == ()
    assert follower.arrive(10) == ()


def test_step_between_two_calls_is_saved_at_the_later_one() -> None:
    follower = Follower()
    follower.arrive(10)
    assert follower.offer(Proposal(0, "local", 11), ready=True).kind == "accepted"
    assert follower.arrive(20) == (Due("local", 0, False),)
    assert follower.arrive(30) == ()


@pytest.mark.dear
@pytest.mark.parametrize("strides", [(1,), (10,), (100,), (1, 7, 30)])
def test_saves_do_not_become_fewer_when_steps_are_further_apart(strides: tuple[int, ...]) -> None:
    world = World(7, [0.01] * 3, 0.004, duration_s=5.0)
    usual = len(Job(world).run().snapshots)
    job = Job(world, strides).run()
    assert len(job.snapshots) > 0.8 * usual
    for number, decision in job.words.items():
        if (
            decision.confirmed
            and number in job.snapshots
            and min(job.steps) >= max(job.begun[number])
        ):
            assert job.saved(number) == {0, 1, 2}
            assert len(job.begun[number]) == 1, "all save the same step"


def test_who_does_not_answer_in_time_is_named() -> None:
    leader = Leader(4, TIMEOUT_S)
    leader.propose("local", 50, 0.0)
    answers = {0: Answer("accepted", 1), 2: Answer("accepted", 1)}
    assert leader.decide(answers, 1, TIMEOUT_S / 2) is None
    decision = leader.decide(answers, 1, TIMEOUT_S)
    assert decision == Decision(False, "no answer from processes [1, 3] in 2 s")


def test_lead_is_bounded() -> None:
    leader = Leader(2, 1000.0)
    for _ in range(40):
        leader.propose("local", 5, 0.0)
        leader.decide({1: Answer("late", 9)}, 4, 500.0)
    assert leader.lead_s == LONGEST_LEAD_S


def test_clock_starts_afresh_when_steps_go_back() -> None:
    clock = StepClock()
    clock.arrive(1, 0.0)
    assert clock.progress is None
    clock.arrive(3, 1.0)
    assert clock.progress == Progress(3, 1.0, 0.5, 2, (1, 3))
    clock.arrive(2, 5.0)
    assert clock.progress is None


@pytest.mark.parametrize("answer", ["accepted", "late"])
@pytest.mark.parametrize("pause_s", [1.0, 10.0])
def test_one_pause_does_not_cost_much_more_than_its_length(
    answer: Literal["accepted", "late"], pause_s: float
) -> None:
    """A save takes a lead at least: the lead must come down soon after one slow answer."""
    leader = Leader(2, TIMEOUT_S)
    now_s = 0.0

    def agree(taken_s: float, kind: Literal["accepted", "late"]) -> None:
        nonlocal now_s
        leader.propose("local", 5, now_s)
        now_s += taken_s
        assert leader.decide({0: Answer("accepted", 4), 1: Answer(kind, 4)}, 4, now_s) is not None

    for _ in range(20):
        agree(0.002, "accepted")
    usual_s = leader.lead_s
    agree(pause_s, answer)
    assert leader.lead_s == 2 * pause_s
    lost_s = 0.0
    while leader.lead_s > 4 * usual_s:
        lost_s += leader.lead_s
        agree(0.002, "accepted")
    assert lost_s <= 12 * pause_s
