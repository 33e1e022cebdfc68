"""The vote: one outcome for all, whoever is slow, refuses, or cannot be heard."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from memory_coordination import MemoryService
from places import VERIFICATION
from programs import printed
from voting import COUNT, VotingJob, save_id

from emergency_ckpt.errors import CoordinationError
from emergency_ckpt.save import Ballot, Outcome, Vote
from emergency_ckpt.save.vote import LEARNED_LATE

SCHEDULES = VERIFICATION / "simulation" / "vote_schedules.py"
LONG_S = 60.0
SOON_S = 1.0


def kinds(outcomes: dict[int, Outcome]) -> list[str]:
    return [outcome.kind for _, outcome in sorted(outcomes.items())]


def everybody(
    make: Callable[[int], Ballot] = lambda p: Ballot(digest=b"d%d" % p),
) -> dict[int, Ballot]:
    return {p: make(p) for p in range(COUNT)}


def test_complete_when_all_published() -> None:
    outcomes = VotingJob(LONG_S).cast(5, everybody())
    assert kinds(outcomes) == ["complete"] * COUNT
    assert {outcome.reason for outcome in outcomes.values()} == {"all 3 processes published"}


@pytest.mark.parametrize("others", [True, False])
def test_all_learn_whether_every_part_is_finite(others: bool) -> None:
    outcomes = VotingJob(LONG_S).cast(
        5, everybody(lambda p: Ballot(digest=b"d", finite=p != 1 or others))
    )
    assert {outcome.finite for outcome in outcomes.values()} == {others}


def test_only_leader_has_ballots_and_has_them_as_they_were_cast() -> None:
    ballots = {
        0: Ballot(digest=b"a", layout=b"same"),
        1: Ballot(digest=b"b", layout=b"same"),
        2: Ballot(digest=b"a", layout=b"other"),
    }
    outcomes = VotingJob(LONG_S).cast(5, ballots)
    assert outcomes[0].ballots == ballots
    assert outcomes[1].ballots == outcomes[2].ballots == {}


@pytest.mark.parametrize("who", range(COUNT))
def test_incomplete_when_one_refuses(who: int) -> None:
    ballots = everybody(lambda p: Ballot(refused="RamdiskFull: no room" if p == who else ""))
    outcomes = VotingJob(LONG_S).cast(5, ballots)
    assert kinds(outcomes) == ["incomplete"] * COUNT
    for outcome in outcomes.values():
        assert f"process {who}: RamdiskFull: no room" in outcome.reason


@pytest.mark.parametrize(("other", "learned_late"), [(LEARNED_LATE, True), ("no room", False)])
def test_all_learn_that_processes_were_late_and_nothing_failed(
    other: str, learned_late: bool
) -> None:
    refusals = {1: LEARNED_LATE, 2: other}
    ballots = everybody(lambda p: Ballot(refused=refusals.get(p, "")))
    outcomes = VotingJob(LONG_S).cast(5, ballots)
    assert kinds(outcomes) == ["incomplete"] * COUNT
    assert [outcomes[p].learned_late for p in range(COUNT)] == [learned_late] * COUNT


def test_save_that_lacks_a_ballot_has_failed() -> None:
    ballots = {0: Ballot(digest=b"d"), 1: Ballot(refused=LEARNED_LATE)}
    outcomes = VotingJob(SOON_S).cast(5, ballots)
    assert [outcomes[p].learned_late for p in ballots] == [False, False]


def test_refusal_is_bounded() -> None:
    outcomes = VotingJob(LONG_S).cast(5, everybody(lambda _: Ballot(refused="x" * 1_000_000)))
    assert kinds(outcomes) == ["incomplete"] * COUNT
    assert len(outcomes[1].reason) < 1000


def test_incomplete_when_one_does_not_vote_and_reason_names_it() -> None:
    job = VotingJob(SOON_S)
    outcomes = job.cast(5, [0, 1])
    assert kinds(outcomes) == ["incomplete"] * 2
    assert "process 2 did not publish" in outcomes[1].reason


def test_incomplete_names_who_refused_and_who_is_absent() -> None:
    outcome = VotingJob(SOON_S).cast(5, {0: Ballot(digest=b"d"), 2: Ballot(refused="no room")})[0]
    assert outcome.reason.startswith("process 2 refused; process 1 did not publish")


def test_incomplete_of_many_absent_processes_is_cut() -> None:
    vote = Vote(MemoryService(10_001).member(0), SOON_S)
    outcome = vote.cast(save_id(5), Ballot(digest=b"d"))
    assert "processes 1, 2, 3, 4, 5, 6, 7, 8 and 9992 more did not publish" in outcome.reason


def test_who_votes_too_late_learns_what_was_decided_without_it() -> None:
    job = VotingJob(SOON_S)
    job.cast(5, [0, 1])
    assert kinds(job.cast(5, [2])) == ["incomplete"]


def test_in_doubt_without_the_leader_and_resolved_when_it_comes() -> None:
    job = VotingJob(SOON_S)
    assert kinds(job.cast(5, [1, 2])) == ["in_doubt"] * 2
    assert job.votes[1].learn(save_id(5)).kind == "in_doubt"
    # Its ballot makes all three: nothing speaks against the save any more.
    assert kinds(job.cast(5, [0])) == ["complete"]
    assert [vote.learn(save_id(5)).kind for vote in job.votes] == ["complete"] * COUNT


def test_process_that_cannot_vote_makes_the_save_incomplete() -> None:
    job = VotingJob(SOON_S)
    job.service.fail(1, "put", "ballot", CoordinationError("put", "ballot", "unreachable"))
    assert kinds(job.cast(5, everybody())) == ["incomplete"] * COUNT


@pytest.mark.parametrize(("operation", "part"), [("list", "ballot"), ("put", "decision")])
def test_leader_that_could_not_decide_decides_later(operation: str, part: str) -> None:
    """Else both saves stay in doubt for ever, and no save could be written again."""
    job = VotingJob(SOON_S)
    job.service.fail(0, operation, part, CoordinationError(operation, part, "unreachable"))
    assert kinds(job.cast(5, everybody())) == ["in_doubt"] * COUNT
    assert job.votes[1].learn(save_id(5)).kind == "in_doubt"
    assert job.votes[0].learn(save_id(5)).kind == "complete"
    assert job.votes[1].learn(save_id(5)).kind == "complete"


def test_leader_decides_on_a_save_before_it_comes_to_the_next() -> None:
    """Else who asks afterwards takes for incomplete what another one was told is complete."""
    job = VotingJob(SOON_S)
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "unreachable"))
    assert kinds(job.cast(10)) == ["in_doubt"] * COUNT
    job.refuse(20)
    assert [vote.learn(save_id(10)).kind for vote in job.votes] == ["complete"] * COUNT


def test_leader_that_cannot_decide_comes_to_no_later_save() -> None:
    job = VotingJob(SOON_S)
    for _ in range(2):
        job.service.fail(0, "put", "10/decision", CoordinationError("put", "10", "unreachable"))
    assert kinds(job.cast(10)) == ["in_doubt"] * COUNT
    assert kinds(job.cast(20)) == ["incomplete"] * COUNT
    assert job.votes[1].learn(save_id(10)).kind == "in_doubt"
    assert kinds(job.cast(30)) == ["complete"] * COUNT
    assert job.votes[1].learn(save_id(10)).kind == "complete"


def test_decision_the_leader_learned_late_is_never_forgotten() -> None:
    """The leader's call failed, and had set the decision all the same."""
    job = VotingJob(SOON_S)
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "no answer"))
    assert kinds(job.cast(10)) == ["in_doubt"] * COUNT
    (ballots,) = {k.partition("/ballot/")[0] for k in job.service.values if "/ballot/" in k}
    job.service.values[f"{ballots}/decision"] = msgspec.json.encode((1, ""))
    for step in range(20, 40):
        job.refuse(step)
    assert [vote.learn(save_id(10)).kind for vote in job.votes] == ["complete"] * COUNT


def test_leader_that_cannot_announce_the_vote_ends_it() -> None:
    """An error here would leave the background thread, and the save would be in doubt for all."""
    job = VotingJob(SOON_S)
    job.service.fail(0, "replace", "at", CoordinationError("replace", "at", "unreachable"))
    assert kinds(job.cast(5, everybody())) == ["incomplete"] * COUNT
    assert kinds(job.cast(6, everybody())) == ["complete"] * COUNT


@pytest.mark.parametrize("ballot", [Ballot(digest=b"d"), Ballot(refused="no")])
def test_doubt_is_resolved_however_many_votes_later(ballot: Ballot) -> None:
    """A process in doubt refuses: without an answer to it no save would ever be complete again."""
    job = VotingJob(LONG_S)
    job.service.fail(2, "get", "decision", CoordinationError("get", "decision", "unreachable"))
    decided = "incomplete" if ballot.refused else "complete"
    assert kinds(job.cast(5, {**everybody(), 1: ballot})) == [decided, decided, "in_doubt"]
    refused = Ballot(refused="SlotBusy: step 5 is in doubt")
    for step in range(6, 26):
        outcomes = job.cast(step, {**everybody(), 2: refused})
        assert kinds(outcomes) == ["incomplete"] * COUNT
    assert job.votes[2].learn(save_id(5)).kind == decided
    assert kinds(job.cast(26, everybody())) == ["complete"] * COUNT


def test_lives_of_a_job_do_not_share_votes() -> None:
    job = VotingJob(LONG_S)
    job.cast(5, everybody())
    assert job.votes[1].learn(save_id(5, "000000000003-life")).kind == "in_doubt"


def test_votes_hold_under_all_schedules() -> None:
    """The leader pauses, leaves, dies, or loses a call or its reply, at each of its calls.

    A save has at most one final outcome, it is complete only with the ballots of all, every wait
    ends, and the keys are bounded.
    """
    told = printed(SCHEDULES, 720, env={"PYTHONHASHSEED": "0"})
    assert all(f"'{kind}'" in told for kind in ("complete", "incomplete", "in_doubt"))
