"""The vote where its decision is gone from the service: nobody acts against what others know."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from memory_coordination import MemoryService

from emergency_ckpt.errors import CoordinationError
from emergency_ckpt.save import Ballot, Outcome, Vote
from emergency_ckpt.types import SaveId

SOON_S = 1.0
COUNT = 3
UNHEARD = CoordinationError("get", "decision", "unreachable")


def save_id(step: int, part: str = "") -> SaveId:
    return SaveId(step=step, incarnation=f"000000000002-life{part}", run_id="run")


class Job:
    """Votes of three processes over one service."""

    def __init__(self) -> None:
        self.service = MemoryService(COUNT)
        self.votes = [Vote(self.service.member(p), SOON_S) for p in range(COUNT)]

    def cast(self, save: SaveId) -> list[Outcome]:
        with ThreadPoolExecutor(COUNT) as pool:
            cast = [pool.submit(vote.cast, save, Ballot(digest=b"d")) for vote in self.votes]
            return [outcome.result() for outcome in cast]

    def refuse(self, save: SaveId) -> None:
        for vote in self.votes:
            vote.refuse(save)

    def delete_decision(self, place: str) -> None:
        """Let a stranger delete the decision on the save at ``place``."""
        (key,) = [k for k in self.service.values if k.endswith(f"/{place}/decision")]
        del self.service.values[key]


@pytest.mark.parametrize(("part", "place"), [("", "10"), (".000002", "10.2")])
def test_deleted_decision_is_told_by_the_leaders_next_save(part: str, place: str) -> None:
    job = Job()
    job.service.fail(2, "get", "decision", UNHEARD)
    outcomes = job.cast(save_id(10, part))
    assert [outcome.kind for outcome in outcomes] == ["complete", "complete", "in_doubt"]
    job.delete_decision(place)
    assert job.votes[2].learn(save_id(10, part)).kind == "in_doubt"
    job.refuse(save_id(20, part))
    job.delete_decision(place.replace("10", "20"))
    assert job.votes[2].learn(save_id(20, part)).kind == "in_doubt", "the leader is at this one"
    assert job.votes[2].learn(save_id(10, part)).kind == "complete"


def test_deleted_decision_of_an_incomplete_save_stays_incomplete() -> None:
    job = Job()
    assert {outcome.kind for outcome in job.cast(save_id(10))} == {"complete"}
    job.refuse(save_id(20))
    job.delete_decision("20")
    job.refuse(save_id(30))
    assert [vote.learn(save_id(20)).kind for vote in job.votes] == ["incomplete"] * COUNT


def test_leader_past_an_undecided_save_never_says_complete() -> None:
    """Others may know by then that it is incomplete, whatever has become of their decision."""
    job = Job()
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "unreachable"))
    assert [outcome.kind for outcome in job.cast(save_id(10))] == ["in_doubt"] * COUNT
    job.refuse(save_id(20))
    assert job.votes[1].learn(save_id(10)).kind == "incomplete"
    job.delete_decision("10")
    assert job.votes[0].learn(save_id(10)).kind == "incomplete"
    assert job.votes[2].learn(save_id(10)).kind == "incomplete"


def test_decision_the_leader_learnt_late_is_never_forgotten() -> None:
    """Its call failed, and what it had set was there all the same."""
    job = Job()
    job.service.fail(0, "put", "decision", CoordinationError("put", "decision", "no answer"))
    assert [outcome.kind for outcome in job.cast(save_id(10))] == ["in_doubt"] * COUNT
    (ballots,) = {k.partition("/ballot/")[0] for k in job.service.values if "/ballot/" in k}
    job.service.values[f"{ballots}/decision"] = msgspec.json.encode((True, ""))
    assert job.votes[0].learn(save_id(10)).kind == "complete"
    for step in range(20, 40):
        job.refuse(save_id(step))
    assert job.votes[1].learn(save_id(10)).kind == "complete"
