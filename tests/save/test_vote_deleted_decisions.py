"""The vote where its decision is gone from the service: nobody acts against what others know."""

from __future__ import annotations

import msgspec
import pytest
from voting import COUNT, VotingJob, save_id

from emergency_ckpt.errors import CoordinationError

SOON_S = 1.0
UNHEARD = CoordinationError("get", "decision", "unreachable")


def delete_decision(job: VotingJob, place: str) -> None:
    """Let a stranger delete the decision on the save at ``place``."""
    (key,) = [k for k in job.service.values if k.endswith(f"/{place}/decision")]
    del job.service.values[key]


@pytest.mark.parametrize(("part", "place"), [("", "10"), (".000002", "10.2")])
def test_deleted_decision_is_told_by_the_leaders_next_save(part: str, place: str) -> None:
    job = VotingJob(SOON_S)
    job.service.fail(2, "get", "decision", UNHEARD)
    first, second = (save_id(step, f"000000000002-life{part}") for step in (10, 20))
    outcomes = job.cast(first).values()
    assert [outcome.kind for outcome in outcomes] == ["complete", "complete", "in_doubt"]
    delete_decision(job, place)
    assert job.votes[2].learn(first).kind == "in_doubt"
    job.refuse(second)
    delete_decision(job, place.replace("10", "20"))
    assert job.votes[2].learn(second).kind == "in_doubt", "the leader is at this one"
    assert job.votes[2].learn(first).kind == "complete"


def test_deleted_decision_of_an_incomplete_save_stays_incomplete() -> None:
    job = VotingJob(SOON_S)
    assert {outcome.kind for outcome in job.cast(10).values()} == {"complete"}
    job.refuse(20)
    delete_decision(job, "20")
    job.refuse(30)
    assert [vote.learn(save_id(20)).kind for vote in job.votes] == ["incomplete"] * COUNT


def test_leader_past_an_undecided_save_never_says_complete() -> None:
    """Others may know by then that it is incomplete, whatever has become of their decision."""
    job = VotingJob(SOON_S)
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "unreachable"))
    assert [outcome.kind for outcome in job.cast(10).values()] == ["in_doubt"] * COUNT
    job.refuse(20)
    assert job.votes[1].learn(save_id(10)).kind == "incomplete"
    delete_decision(job, "10")
    assert job.votes[0].learn(save_id(10)).kind == "incomplete"
    assert job.votes[2].learn(save_id(10)).kind == "incomplete"


def test_decision_the_leader_learnt_late_is_never_forgotten() -> None:
    """Its call failed, and what it had set was there all the same."""
    job = VotingJob(SOON_S)
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "no answer"))
    assert [outcome.kind for outcome in job.cast(10).values()] == ["in_doubt"] * COUNT
    (ballots,) = {k.partition("/ballot/")[0] for k in job.service.values if "/ballot/" in k}
    job.service.values[f"{ballots}/decision"] = msgspec.json.encode((True, ""))
    assert job.votes[0].learn(save_id(10)).kind == "complete"
    for step in range(20, 40):
        job.refuse(step)
    assert job.votes[1].learn(save_id(10)).kind == "complete"
