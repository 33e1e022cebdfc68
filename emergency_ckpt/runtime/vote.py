"""The background vote: whether every process has published a save.

Two slots are enough only if no process overwrites the older save while another one still counts on
it. So the outcome is one value, set once by the leader in the coordination service, and every
process acts on that value alone. Who cannot learn it is *in doubt* and overwrites neither save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import msgspec

from emergency_ckpt.core.save_decision import all_published, decide_vote
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded
from emergency_ckpt.runtime.coordination import Coordinator, deadline_left_s, forget
from emergency_ckpt.types import SaveId

_KEPT_VOTES = 8
_LEARN_TIMEOUT_S = 0.5
_REASON_LIMIT_CHARS = 200


class Ballot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one process says of a save: under 100 bytes, or a reason why it refuses.

    Names and values of a vote are short: with thousands of processes they all come at once, and
    the service is one process. ``benchmarks/scale.py`` counts them.

    Attributes:
      digest: of the published contents.
      layout: digest of which shards these are; replicas with equal layouts should have equal
        digests.
    """

    digest: str = ""
    layout: str = ""
    refused: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """``ballots`` are those of all processes, at the leader only."""

    kind: Literal["complete", "incomplete", "in_doubt"]
    reason: str
    ballots: Mapping[int, Ballot] = dataclasses.field(default_factory=dict[int, Ballot])


class _Decision(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``reason``: of an incomplete save only; there is one reason for a complete one."""

    complete: bool
    reason: str


class Vote:
    """Casts votes of this process. All methods block; they belong to the background thread."""

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._votes: deque[str] = deque()

    def cast(self, save: SaveId, ballot: Ballot) -> Outcome:
        """Vote on ``save`` and learn the outcome. Collective, each save once."""
        name = _name(save)
        coordinator = self._coordinator
        ballot = msgspec.structs.replace(ballot, refused=ballot.refused[:_REASON_LIMIT_CHARS])
        problem, wait_s, began_s = "", self._timeout_s, time.monotonic()
        if coordinator.process_index == 0:
            self._forget_old(name)
        try:
            key = f"{name}/ballot/{coordinator.process_index}"
            coordinator.put(key, msgspec.json.encode(ballot))
            coordinator.barrier(f"{name}/all", self._timeout_s)
        except (CoordinationError, DeadlineExceeded) as error:
            problem = str(error)
            # The leader waits its whole time for a ballot that was not cast, and decides then.
            wait_s = deadline_left_s(began_s + 2 * self._timeout_s)
        if coordinator.process_index != 0:
            return self._learn(name, wait_s, problem)
        try:
            return self._decide(name)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}")

    def _forget_old(self, name: str) -> None:
        """Also of votes without a decision: a newer complete save has ended doubts about them."""
        self._votes.append(name)
        while len(self._votes) > _KEPT_VOTES:
            forget(self._coordinator, self._votes.popleft())

    def learn(self, save: SaveId) -> Outcome:
        """Ask again for the outcome of a save that is in doubt. Not collective, returns soon.

        The leader decides now when it could not before: else nobody would ever learn it.
        """
        outcome = self._learn(_name(save), _LEARN_TIMEOUT_S, "")
        if outcome.kind != "in_doubt" or self._coordinator.process_index != 0:
            return outcome
        try:
            return self._decide(_name(save))
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", str(error))

    def _decide(self, name: str) -> Outcome:
        coordinator = self._coordinator
        ballots = {
            int(process): msgspec.json.decode(data, type=Ballot)
            for process, data in coordinator.list(f"{name}/ballot").items()
        }
        refused = {process for process, ballot in ballots.items() if ballot.refused}
        result = decide_vote(range(coordinator.process_count), ballots.keys() - refused, refused)
        reason = "; ".join(
            [result.reason, *(f"process {p}: {ballots[p].refused}" for p in sorted(refused)[:4])]
        )
        complete = result.outcome == "complete"
        decision = _Decision(complete, "" if complete else reason)
        coordinator.put(f"{name}/decision", msgspec.json.encode(decision))
        return Outcome(result.outcome, reason, ballots)

    def _learn(self, name: str, timeout_s: float, problem: str) -> Outcome:
        try:
            data = self._coordinator.get(f"{name}/decision", timeout_s)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}".strip())
        decision = msgspec.json.decode(data, type=_Decision)
        if not decision.complete:
            return Outcome("incomplete", decision.reason)
        return Outcome("complete", all_published(self._coordinator.process_count))


def _name(save: SaveId) -> str:
    life = hashlib.sha256(save.incarnation.encode()).hexdigest()[:12]
    return f"vote/{life}/{save.step}"
