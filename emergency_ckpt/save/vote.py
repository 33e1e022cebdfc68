"""The background vote: whether every process has published a save. ``save`` has the rules.

The ballots are sent in a round (``cluster.round``) that process 0, the leader, leads. The decision
is a cell beside the round. The leader decides on each save before it begins the next, and never
goes back to an earlier save. So an earlier save without a decision is incomplete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import (
    Coordinator,
    deadline_left_s,
    decode_each,
    decode_message,
    forget,
)
from emergency_ckpt.cluster.left_processes import LeftProcesses, Place, has_come_to, in_order
from emergency_ckpt.cluster.round import Absent, Cell, Round, Series
from emergency_ckpt.core.save.save_rules import all_published, decide_vote
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import CheckpointError, CoordinationError, DeadlineExceeded, PeerLeft
from emergency_ckpt.save.turns import Turns
from emergency_ckpt.types import LOCAL, SaveId

_KEPT_VOTES = 4
_LEARN_TIMEOUT_S = 0.5
_BALLOT_LIMIT_CHARS = 200
_LATE_AGAIN_S = 5.0
"""Longest wait of the leader for a process that was too late for the previous vote as well."""
CHANGED = -1
"""In the place of a step: the save has changed."""
SKIPPED = "skipped it: the previous save was under way"
LEARNED_LATE = "received the announcement of the step too late"
"""The refusal of a process that is late (``core.save.announcements``), in each tier."""


class Ballot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The ballot of one process on a save; short, since those of thousands come at once.

    Attributes:
      digest: of the published contents; in base64 on the wire.
      layout: digest of the set of shards; replicas with equal layouts should have equal digests.
      finite: the values of these shards were checked, and all are finite.
      unchanged_since: the step of the previous save, if all these shards equal its shards.
    """

    digest: bytes = b""
    layout: bytes = b""
    refused: str = ""
    finite: bool = False
    unchanged_since: int = CHANGED


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a save, as one process knows it.

    ``ballots``: those of all processes, at the leader; empty on the others.
    ``finite``: every process's part of a complete save is finite; False where that is not known.
    ``learned_late``: the save is incomplete for the reason ``LEARNED_LATE`` alone.
    """

    kind: Literal["complete", "incomplete", "in_doubt"]
    reason: str
    ballots: Mapping[int, Ballot] = dataclasses.field(default_factory=dict[int, Ballot])
    finite: bool = False
    learned_late: bool = False


_INCOMPLETE, _COMPLETE, _NOT_IN_TIME = 0, 1, 2


class _Decision(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The leader's decision on a save.

    Attributes:
      end: ``_NOT_IN_TIME``: incomplete, as ``Outcome.learned_late`` says.
      reason: of an incomplete save; empty for a complete save, whose reason is always the same.
      left_out: as ``Turns.announce``.
    """

    end: Literal[0, 1, 2]
    reason: str
    finite: bool = False
    left_out: Place | None = None


class Vote:
    """Casts votes of this process. All methods block; they belong to the background thread.

    Attributes:
      turns: the saves that the leader has left out, as its decisions report them.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timeout_s: float,
        left_processes: LeftProcesses | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._left_processes = left_processes or LeftProcesses(coordinator)
        self._leads = coordinator.process_index == 0
        self.turns = Turns(leads=self._leads)
        # At the leader.
        self._votes = Series(_KEPT_VOTES)
        self._begun: SaveId | None = None
        self._is_decided = True
        self._late: set[int] = set()
        self._is_cut_short = False  # the newest vote, since the processes were late again

    def cast(self, save: SaveId, ballot: Ballot, *, is_announced: bool = False) -> Outcome:
        """Vote on ``save`` and return the outcome. Collective, once for each save.

        ``is_announced``: a process may begin a later save before it reads that ``save`` was due.
        """
        problem, began_s = "", time.monotonic()
        try:
            self.hand_in(save, ballot)
        except (CoordinationError, DeadlineExceeded) as error:
            problem = str(error)
        if not self._leads:
            # Where a ballot is not cast, the leader decides after the whole timeout.
            return self._learn(save, deadline_left_s(began_s + 2 * self._timeout_s), problem)
        try:
            missing = {} if problem else self._wait_for_ballots(save)
            return self._decide(save, missing, ends_wait=True, is_announced=is_announced)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}".strip())

    def refuse(self, save: SaveId, reason: str = SKIPPED) -> None:
        """Vote against ``save``, in which this process takes no part; does not wait. Never raises.

        Without this ballot the other processes would wait for it.
        """
        try:
            self.hand_in(save, Ballot(refused=reason))
            if self._leads:
                self._decide(save, {})
        except CheckpointError as error:
            # A process that waits for the ballot runs into its deadline, and reports that.
            logging.warning("step %d was skipped: %s", save.step, error)

    def refuse_late(self, save: SaveId) -> None:
        """Vote against ``save``, whose announcement this process read too late. Never raises.

        Returns at once, from any thread: a later save may be under way here, of which the others
        know. The leader is never late, and never calls this.
        """
        try:
            self._ballots(save).say(msgspec.json.encode(Ballot(refused=LEARNED_LATE)))
        except CheckpointError as error:
            logging.warning("step %d was announced too late: %s", save.step, error)

    def hand_in(self, save: SaveId, ballot: Ballot) -> None:
        """Send this process's ballot, and do not wait: the first half of ``cast``."""
        if self._leads:
            self._begin(save)
        self._left_processes.come_to(LOCAL, save)
        refused = valid_text(ballot.refused, _BALLOT_LIMIT_CHARS)
        ballot = msgspec.structs.replace(ballot, refused=refused)
        self._ballots(save).say(msgspec.json.encode(ballot))

    def learn(self, save: SaveId) -> Outcome:
        """Ask again for the outcome of a save that is in doubt. Not collective, returns soon.

        A leader that could not decide before decides now: otherwise nobody ever would.
        """
        outcome = self._learn(save, _LEARN_TIMEOUT_S, "")
        if outcome.kind != "in_doubt" or not self._leads:
            return outcome
        try:
            if self._begun is not None and in_order(self._begun) > in_order(save):
                return Outcome("incomplete", has_come_to(0, self._begun.step))
            return self._decide(save, {})
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", str(error))

    def _ballots(self, save: SaveId, absent: Absent | None = None) -> Round:
        """Return the round in which all processes send their ballots to the leader."""
        name = f"{_name(save)}/ballot"
        return Round(self._coordinator, name, self._timeout_s, absent=absent)

    # The leader.

    def _begin(self, save: SaveId) -> None:
        if self._begun is not None and _incarnation(self._begun) != _incarnation(save):
            # All have restored since then, so no process is in doubt about a save before that.
            forget(self._coordinator, _incarnation(self._begun))
            self._votes, self._late = Series(_KEPT_VOTES), set()
        elif self._begun is not None:
            if not self._is_decided:
                # Once ``save`` has begun, the others take the previous save for incomplete.
                self._decide(self._begun, {})
            if self._is_cut_short:
                # These are only slower than the others: the next vote waits for them.
                self._late -= self._ballots(self._begun).said().keys()
        self._is_cut_short = False
        self._begun, self._is_decided = save, False
        # Noted before a call that may fail: otherwise the vote's keys would never be deleted.
        self._votes.add(_name(save))
        self._votes.tidy(self._coordinator)

    def _wait_for_ballots(self, save: SaveId) -> dict[int, str]:
        """Return, by process, why missing ballots will not come; {} after all, or the deadline."""
        count, began_s = self._coordinator.process_count, time.monotonic()
        reasons: dict[int, str] = {}

        def find_absent(missing: Collection[int]) -> dict[int, str]:
            absent = self._left_processes.absent(LOCAL, save, missing)
            self._late = self._late.intersection(missing) - absent.keys()
            is_over = time.monotonic() - began_s > _LATE_AGAIN_S
            if not absent and is_over and self._late.issuperset(missing):
                self._is_cut_short = True
                return {p: f"process {p} is late again" for p in missing}
            return absent

        def rule(said: Mapping[int, bytes], absent: Mapping[int, str]) -> bytes | None:
            reasons.update(absent)
            return b"" if absent or len(said) == count else None

        ballots = self._ballots(save, find_absent)
        try:
            ballots.hear(rule)
        except DeadlineExceeded as error:
            if not error.missing:
                raise  # the service did not answer
            self._late = set(range(count)) - ballots.heard.keys()
        else:
            if not reasons:
                self._late.clear()
        return reasons

    def _decide(
        self,
        save: SaveId,
        missing: Mapping[int, str],
        *,
        ends_wait: bool = False,
        is_announced: bool = False,
    ) -> Outcome:
        said, name = self._ballots(save).said(), f"{_name(save)}/ballot"
        ballots = decode_each(said, Ballot, name, lambda text: Ballot(refused=text))
        refused = {process for process, ballot in ballots.items() if ballot.refused}
        everyone = set(range(self._coordinator.process_count))
        complete, result = decide_vote(everyone, ballots.keys() - refused, refused)
        reasons = [f"process {p}: {ballots[p].refused}" for p in sorted(refused)[:4]]
        reasons += [missing[p] for p in sorted(missing)[:4] if p not in ballots]
        reason = "; ".join([result, *reasons])
        finite = complete and all(ballot.finite for ballot in ballots.values())
        left_out = self.turns.announce(ends_wait=ends_wait)
        end = _COMPLETE if complete else _INCOMPLETE
        has_failed = {p for p in refused if ballots[p].refused != LEARNED_LATE}
        lacking = missing.keys() - ballots.keys()
        if is_announced and lacking:
            passed = self._left_processes.passed(LOCAL, save, lacking).keys()
            has_failed |= lacking - passed
        elif len(ballots) < len(everyone):
            has_failed |= everyone - ballots.keys()
        if not (complete or has_failed):
            end = _NOT_IN_TIME
        decision = _Decision(end, "" if complete else reason, finite, left_out)
        # Another decision may be set already; the one that is set counts.
        data = self._decision(save).settle(msgspec.json.encode(decision))
        outcome = self._outcome_of(save, data)
        return dataclasses.replace(outcome, reason=outcome.reason or reason, ballots=ballots)

    # All.

    def _learn(self, save: SaveId, timeout_s: float, problem: str) -> Outcome:
        def inspect() -> str:
            return "" if self._leads else self._left_processes.absent(LOCAL, save, {0}).get(0, "")

        try:
            try:
                return self._outcome_of(save, self._decision(save).wait(timeout_s, inspect))
            except PeerLeft as error:
                is_passed = 0 in self._left_processes.passed(LOCAL, save, [0])
                return Outcome("incomplete" if is_passed else "in_doubt", error.problem)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}".strip())

    def _outcome_of(self, save: SaveId, data: bytes) -> Outcome:
        """Return the outcome that the decision ``data`` gives ``save``. CoordinationError."""
        name = f"{_name(save)}/decision, process 0"
        decision: _Decision = decode_message(data, _Decision, name)
        self._is_decided = self._is_decided or save == self._begun
        if self._leads and decision.end == _COMPLETE:
            self._votes.keep(self._coordinator, _name(save))
        self.turns.hear(decision.left_out)
        if decision.end != _COMPLETE:
            return Outcome("incomplete", decision.reason, learned_late=decision.end == _NOT_IN_TIME)
        reason = all_published(self._coordinator.process_count)
        return Outcome("complete", reason, finite=decision.finite)

    def _decision(self, save: SaveId) -> Cell:
        return Cell(self._coordinator, f"{_name(save)}/decision")


def _incarnation(save: SaveId) -> str:
    """Return the key of an incarnation's votes, without the part that a forced save adds."""
    name = save.incarnation.partition(".")[0]
    return f"vote/{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _name(save: SaveId) -> str:
    """Return the keys' prefix: incarnation, step, and the part that a forced save adds."""
    part = save.incarnation.partition(".")[2]
    return f"{_incarnation(save)}/{save.step}" + (f".{int(part)}" if part else "")
