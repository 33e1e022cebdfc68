"""The vote where a process leaves, dies, or does not take part: it ends soon, and says why."""

from __future__ import annotations

import queue

import pytest
from memory_coordination import MemoryService
from voting import COUNT, VotingJob, results, save_id

from emergency_ckpt.cluster import round as rounds_and_cells
from emergency_ckpt.cluster.left_processes import LEAVING
from emergency_ckpt.save import Ballot, Outcome, vote
from emergency_ckpt.save.vote import LEARNED_LATE, SKIPPED

NEVER_S = 200.0
"""No test waits so long: pytest's own limit would end it."""
ALL = set(range(COUNT))
KIND = ("in_doubt", "incomplete", "incomplete")
"""Outcome of a save for the others where a process has left: only the leader decides."""


class Service(MemoryService):
    """Notes when somebody looks for who has left."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self.looks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def check(self, process_index: int, operation: str, key: str) -> None:
        if operation in ("list", "find") and key.partition("/")[0] == LEAVING:
            self.looks.put(process_index)
        super().check(process_index, operation, key)


class Job(VotingJob):
    def __init__(self) -> None:
        service = Service()
        super().__init__(NEVER_S, service)
        self.looks = service.looks

    def looked(self, times: int) -> None:
        """Return when processes have looked so often from now on for who has left."""
        while not self.looks.empty():
            self.looks.get()
        for _ in range(times):
            self.looks.get(timeout=60)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes soon; nothing here depends on when."""
    monkeypatch.setattr(rounds_and_cells, "_FIRST_INSPECTION_S", 0.05)


def check_all(outcomes: dict[int, Outcome], kind: str, text: str = "") -> None:
    assert {outcome.kind for outcome in outcomes.values()} == {kind}, outcomes
    assert all(text in outcome.reason for outcome in outcomes.values()), outcomes


@pytest.mark.parametrize("who", range(COUNT))
def test_vote_process_left_fails_at_once_and_says_why(who: int) -> None:
    job = Job()
    others = ALL - {who}
    pending = job.begin(10, others)
    job.left_processes[who].leave("ValueError: boom", {"local": save_id(5)})
    for outcomes in (results(pending), job.cast(15, others)):
        check_all(outcomes, KIND[who], f"process {who} has left: ValueError: boom")


@pytest.mark.parametrize("who", range(COUNT))
def test_vote_begun_by_a_leaving_process_completes(who: int) -> None:
    """All stop at about the same time, and the first of them must not cost the others the save."""
    job = Job()
    job.left_processes[who].leave("it was stopped", {"local": save_id(10)})
    pending = job.begin(10, ALL - {who})
    job.looked(3)
    pending |= job.begin(10, {who})
    check_all(results(pending), "complete")
    job.left_processes[who].gone("it was stopped")
    assert {job.votes[p].learn(save_id(10)).kind for p in ALL - {who}} == {"complete"}


@pytest.mark.parametrize("who", range(COUNT))
def test_vote_begun_and_given_up_by_a_process_fails(who: int) -> None:
    job = Job()
    pending = job.begin(10, ALL - {who})
    job.left_processes[who].leave("KeyError: bug", {"local": save_id(10)})
    job.left_processes[who].gone("KeyError: bug")
    check_all(results(pending), KIND[who], "KeyError: bug")


def test_vote_of_a_later_incarnation_counts_an_earlier_departure() -> None:
    job = Job()
    job.left_processes[2].leave("it was stopped", {"local": save_id(50, "000000000001-life")})
    check_all(job.cast(10, ALL - {2}), "incomplete", "process 2 has left")


@pytest.mark.parametrize("who", range(COUNT))
def test_vote_process_without_the_save_costs_no_later_one(who: int) -> None:
    """Step 10 is not due at one of them: the others know it as soon as that one saves again."""
    job = Job()
    others = ALL - {who}
    pending = job.begin(10, others)
    alone = job.begin(20, {who})
    check_all(results(pending), "incomplete", f"process {who} did not")
    outcomes = job.cast(20, others) | results(alone)
    check_all(outcomes, "complete")


@pytest.mark.parametrize("who", range(COUNT))
def test_vote_refused_by_who_skips_the_save_ends(who: int) -> None:
    job = Job()
    pending = job.begin(10, ALL - {who})
    job.votes[who].refuse(save_id(10))
    check_all(results(pending), "incomplete", SKIPPED)
    check_all(job.cast(20), "complete")


def late_twice() -> Job:
    """A job whose process 2 came too late for the votes on steps 10 and 20."""
    job = Job()
    leader = job.votes[0]
    leader._timeout_s = 0.5  # pyright: ignore[reportPrivateUsage]
    check_all(job.cast(10, {0, 1}), "incomplete", "process 2 did not publish")
    leader._timeout_s = NEVER_S  # pyright: ignore[reportPrivateUsage]
    check_all(job.cast(20, {0, 1}), "incomplete", "process 2 is late again")
    return job


def test_vote_without_a_late_process_waits_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote, "_LATE_AGAIN_S", 0.0)
    job = late_twice()
    check_all(job.cast(30), "complete")
    pending = job.begin(40, {0, 1})
    job.looked(3)  # it is not late any more: the whole time is its again
    assert not any(f.done() for f in pending.values())
    pending |= job.begin(40, {2})
    check_all(results(pending), "complete")


def test_vote_waits_again_for_a_process_that_is_only_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 2 was late once, and comes to each vote after the others have waited a while."""
    monkeypatch.setattr(vote, "_LATE_AGAIN_S", 0.0)
    job = late_twice()
    check_all(job.cast(20, {2}), "incomplete", "process 2 is late again")
    pending = job.begin(30, {0, 1})
    job.looked(8)
    assert not any(f.done() for f in pending.values())
    pending |= job.begin(30, {2})
    check_all(results(pending), "complete")


def test_decision_forgotten_leaves_nobody_in_doubt_for_ever() -> None:
    job = Job()
    for step in range(1, 30):
        check_all(job.cast(step), "complete")
    assert job.votes[1].learn(save_id(29)).kind == "complete"
    assert job.votes[1].learn(save_id(2)).kind == "incomplete", "a newer one is complete"


def test_decision_of_the_newest_complete_save_is_never_forgotten() -> None:
    job = Job()
    check_all(job.cast(1), "complete")
    for step in range(2, 30):
        job.refuse(step)
    assert [each.learn(save_id(1)).kind for each in job.votes] == ["complete"] * COUNT


def test_votes_name_no_barrier_and_keep_few_keys() -> None:
    job = Job()
    sizes = set[int]()
    for step in range(1, 200):
        check_all(job.cast(step), "complete")
        if step > 50:
            sizes.add(len(job.service.values))
    assert len(sizes) == 1
    check_all(job.cast(save_id(1, "000000000003-life")), "complete")
    assert len(job.service.values) < 10, "the votes of the life before are forgotten"


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize("other", ["", LEARNED_LATE, "no room"])
def test_process_past_an_announced_save_is_late(is_announced: bool, other: str) -> None:
    """A notice makes process 1 save step 15, before it reads that step 10 was due."""
    job = Job()
    later = job.begin(15, [1])
    outcomes = results(
        job.begin(10, {0: Ballot(digest=b"d"), 2: Ballot(refused=other)}, is_announced=is_announced)
    )
    check_all(outcomes, "incomplete", "process 1 did not save it")
    is_late = is_announced and other != "no room"
    assert [outcomes[process].learned_late for process in (0, 2)] == [is_late, is_late]
    others = job.begin(15, [0, 2])
    check_all({**results(later), **results(others)}, "complete")
