"""Votes of three processes over one service, for tests of the vote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from memory_coordination import MemoryService

from emergency_ckpt.cluster import LeftProcesses
from emergency_ckpt.save import Ballot, Outcome, Vote
from emergency_ckpt.types import SaveId

COUNT = 3
Save = int | SaveId
Ballots = Mapping[int, Ballot] | Iterable[int]
Voting = dict[int, Future[Outcome]]


def save_id(step: int, incarnation: str = "000000000002-life") -> SaveId:
    return SaveId(step=step, incarnation=incarnation, run_id="run")


def results(voting: Voting) -> dict[int, Outcome]:
    return {process: outcome.result() for process, outcome in voting.items()}


class VotingJob:
    """Processes that vote on saves; where a save is asked for, its step may be given."""

    def __init__(self, timeout_s: float, service: MemoryService | None = None) -> None:
        self.service = service or MemoryService(COUNT)
        members = [self.service.member(process) for process in range(COUNT)]
        self.left_processes = [LeftProcesses(member) for member in members]
        pairs = zip(members, self.left_processes, strict=True)
        self.votes = [Vote(member, timeout_s, left) for member, left in pairs]
        self._pool = ThreadPoolExecutor(2 * COUNT)

    def begin(
        self, save: Save, ballots: Ballots = range(COUNT), *, is_announced: bool = False
    ) -> Voting:
        """Let processes vote, at the same time: by their ballots, or for the save."""
        if not isinstance(ballots, Mapping):
            ballots = dict.fromkeys(ballots, Ballot(digest=b"d"))
        save = save_id(save) if isinstance(save, int) else save
        return {
            p: self._pool.submit(self.votes[p].cast, save, ballot, is_announced=is_announced)
            for p, ballot in ballots.items()
        }

    def cast(self, save: Save, ballots: Ballots = range(COUNT)) -> dict[int, Outcome]:
        return results(self.begin(save, ballots))

    def refuse(self, save: Save) -> None:
        for vote in self.votes:
            vote.refuse(save_id(save) if isinstance(save, int) else save)
