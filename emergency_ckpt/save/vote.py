"""The background vote: whether every process has published a save.

Two slots are enough only if no process overwrites the older save while another one still counts on
it. So the outcome is one value, set once in the coordination service, and every process acts on
that value alone. Who cannot learn it is *in doubt* and overwrites neither save.

The leader alone sets "complete". "Incomplete" is also set by a process that knows that the leader
will never decide: who comes first wins, and all act on what was set. So a decision that is not
there may become "incomplete" at any time, and the decision of the newest complete save is never
deleted. Others than the leader may delete it, so the leader says with each save that it begins
which one was the newest complete before, and never decides on a save that it has passed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import Coordinator, deadline_left_s, forget
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.messages import (
    by_process,
    decode_each,
    decode_message,
    number_of,
    process_of,
)
from emergency_ckpt.cluster.round import Cell, wait_for_key
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.core.save.save_rules import all_published, decide_vote
from emergency_ckpt.errors import CheckpointError, CoordinationError, DeadlineExceeded, PeerLeft
from emergency_ckpt.types import LOCAL, SaveId

_KEPT_VOTES = 4
_LEARN_TIMEOUT_S = 0.5
_BALLOT_LIMIT_CHARS = 200
_LATE_AGAIN_S = 5.0
"""Longest wait of the leader for a process that was too late for the vote before as well."""
SKIPPED = "skipped it: the save before was under way"


class Ballot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The ballot of one process on a save: under 100 bytes, or the reason of its refusal.

    Names and values of a vote are short: with thousands of processes they all come at once, and
    the service is one process. ``benchmarks/scale`` counts them.

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


class _Led(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The places of the save that the leader began last, and of the newest complete one by then."""

    begun: str
    complete: str = ""


class Vote:
    """Casts votes of this process. All methods block; they belong to the background thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        timeout_s: float,
        left_processes: LeftProcesses | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._left_processes = left_processes or LeftProcesses(coordinator)
        # At the leader.
        self._votes: deque[str] = deque()
        self._life = self._begun = self._newest_complete = ""
        self._late: set[int] = set()

    def cast(self, save: SaveId, ballot: Ballot) -> Outcome:
        """Vote on ``save`` and learn the outcome. Collective, each save once."""
        problem, leads = "", self._coordinator.process_index == 0
        began_s = time.monotonic()
        try:
            if leads:
                self._begin(save)
            self.hand_in(save, ballot)
        except (CoordinationError, DeadlineExceeded) as error:
            problem = str(error)
        if not leads:
            # The leader waits its whole time for a ballot that was not cast, and decides then.
            return self._learn(save, deadline_left_s(began_s + 2 * self._timeout_s), problem)
        try:
            missing = {} if problem else self._wait_for_ballots(save)
            return self._decide(save, missing)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}".strip())

    def refuse(self, save: SaveId) -> None:
        """Vote against ``save``, in which this process takes no part; does not wait. Never raises.

        The others would wait for its ballot.
        """
        try:
            if self._coordinator.process_index == 0:
                self._begin(save)
            self.hand_in(save, Ballot(refused=SKIPPED))
            if self._coordinator.process_index == 0:
                self._decide(save, {})
        except CheckpointError as error:
            # Who waits for it runs into its deadline, and says so.
            logging.warning("step %d was skipped: %s", save.step, error)

    def hand_in(self, save: SaveId, ballot: Ballot) -> None:
        """Put this process's ballot, and wait for nothing: the first half of ``cast``."""
        coordinator, name = self._coordinator, _name(save)
        ballot = msgspec.structs.replace(ballot, refused=ballot.refused[:_BALLOT_LIMIT_CHARS])
        key = f"{name}/ballot/{coordinator.process_index}"
        coordinator.put(key, msgspec.json.encode(ballot))
        # Not a barrier: the service never forgets the name of one.
        if coordinator.count(f"{name}/n") == coordinator.process_count:
            coordinator.put(f"{name}/all", b"")

    def learn(self, save: SaveId) -> Outcome:
        """Ask again for the outcome of a save that is in doubt. Not collective, returns soon.

        The leader decides now when it could not before: else nobody would ever learn it.
        """
        outcome = self._learn(save, _LEARN_TIMEOUT_S, "")
        if outcome.kind != "in_doubt" or self._coordinator.process_index != 0:
            return outcome
        try:
            if self._life == _life(save) and _is_after(self._begun, _place(save)):
                # Others may have set "incomplete", and a stranger may have deleted that.
                return self._veto(_name(save), _has_passed(0, self._begun))
            return self._decide(save, {})
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", str(error))

    # The leader.

    def _begin(self, save: SaveId) -> None:
        name, life = _name(save), _life(save)
        if self._life not in ("", life):
            # All have restored since then, and nobody is in doubt about a save before that.
            forget(self._coordinator, self._life)
            self._votes.clear()
            self._newest_complete, self._late = "", set()
        self._life, self._begun = life, _place(save)
        # Noted before the call that may fail: else the keys of this vote would never be deleted.
        # What is decided of these, or not, is "incomplete" to whoever still asks.
        self._votes.append(name)
        # Who waits for the decision on an older save that this process has skipped looks here.
        led = _Led(self._begun, self._newest_complete.rpartition("/")[2])
        self._coordinator.replace(f"{life}/led", msgspec.json.encode(led))
        while len(self._votes) > _KEPT_VOTES:
            oldest = self._votes.popleft()
            if oldest != self._newest_complete:
                forget(self._coordinator, oldest)

    def _wait_for_ballots(self, save: SaveId) -> dict[int, str]:
        """Return why ballots are missing that will not come, by process; {} when all have."""
        name, began_s = _name(save), time.monotonic()
        everyone = set(range(self._coordinator.process_count))
        absent: dict[int, str] = {}

        def look() -> str:
            ballots, passed = self._seen(save)
            self._late -= ballots | passed.keys()
            missing = everyone - ballots
            if not missing:
                return "all are here"
            absent.update(passed)
            absent.update(self._left_processes.absent(LOCAL, save, missing - passed.keys()))
            is_over = time.monotonic() - began_s > _LATE_AGAIN_S
            if not absent and is_over and missing <= self._late:
                absent.update({p: f"process {p} is late again" for p in missing})
            return "; ".join(absent.values())

        try:
            wait_for_key(self._coordinator, f"{name}/all", self._timeout_s, look)
        except DeadlineExceeded:
            self._late = everyone - self._seen(save)[0]
        except PeerLeft:
            return absent
        else:
            self._late.clear()
        return {}

    def _seen(self, save: SaveId) -> tuple[set[int], dict[int, str]]:
        """Return who voted on ``save``, and who has only voted on a later one of this life."""
        voted, passed = set[int](), dict[int, str]()
        own, in_order = _place(save), _in_order(_place(save))
        count = self._coordinator.process_count
        for key in self._coordinator.list(_life(save)):
            place, is_ballot, text = key.partition("/ballot/")
            process = process_of(text, f"{_life(save)}/{place}/ballot", count) if is_ballot else -1
            if is_ballot and place == own:
                voted.add(process)
            elif is_ballot and _in_order(place) > in_order:
                passed[process] = _has_passed(process, place)
        return voted, {p: text for p, text in passed.items() if p not in voted}

    def _decide(self, save: SaveId, missing: Mapping[int, str]) -> Outcome:
        coordinator, name = self._coordinator, _name(save)
        found = coordinator.list(f"{name}/ballot")
        ballots = decode_each(
            by_process(found, f"{name}/ballot", coordinator.process_count),
            Ballot,
            f"{name}/ballot",
            lambda text: Ballot(refused=text),
        )
        refused = {process for process, ballot in ballots.items() if ballot.refused}
        result = decide_vote(range(coordinator.process_count), ballots.keys() - refused, refused)
        reasons = [f"process {p}: {ballots[p].refused}" for p in sorted(refused)[:4]]
        reasons += [missing[p] for p in sorted(missing)[:4] if p not in ballots]
        reason = "; ".join([result.reason, *reasons])
        complete = result.outcome == "complete"
        decided = self._set(name, _Decision(complete, "" if complete else reason))
        if not decided.complete:
            return Outcome("incomplete", decided.reason or reason, ballots)
        self._note_complete(name)
        return Outcome("complete", result.reason, ballots)

    def _note_complete(self, name: str) -> None:
        newest = self._newest_complete
        if newest and newest != name and newest not in self._votes:
            forget(self._coordinator, newest)
        self._newest_complete = name

    # All.

    def _set(self, name: str, decision: _Decision) -> _Decision:
        """Set the decision unless there is one; return the one that counts."""
        cell = self._cell(name)
        return _decision_of(cell.settle(msgspec.json.encode(decision)), cell.key)

    def _cell(self, name: str) -> Cell:
        return Cell(self._coordinator, f"{name}/decision")

    def _learn(self, save: SaveId, timeout_s: float, problem: str) -> Outcome:
        name, leads = _name(save), self._coordinator.process_index == 0
        led = _Led("")

        def look() -> str:
            nonlocal led
            if leads:
                return ""
            led = self._find_led(save)
            if _is_after(led.begun, _place(save)):
                return _has_passed(0, led.begun)
            return self._left_processes.absent(LOCAL, save, {0}).get(0, "")

        try:
            cell = self._cell(name)
            decision = _decision_of(cell.wait(timeout_s, look), cell.key)
        except PeerLeft as error:
            if led.complete == _place(save):
                decision = _Decision(True, "")
            else:
                return self._veto(name, error.problem)
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{problem} {error}".strip())
        if leads and decision.complete:
            self._note_complete(name)
        return self._outcome_of(decision)

    def _veto(self, name: str, reason: str) -> Outcome:
        try:
            decision = self._set(name, _Decision(False, reason[: 2 * _BALLOT_LIMIT_CHARS]))
        except (CoordinationError, DeadlineExceeded) as error:
            return Outcome("in_doubt", f"{reason}; {error}")
        return self._outcome_of(decision)

    def _outcome_of(self, decision: _Decision) -> Outcome:
        if not decision.complete:
            return Outcome("incomplete", decision.reason)
        return Outcome("complete", all_published(self._coordinator.process_count))

    def _find_led(self, save: SaveId) -> _Led:
        key = f"{_life(save)}/led"
        found = self._coordinator.find(key)
        if found is None:
            return _Led("")
        return decode_message(found, _Led, f"{key}, process 0", limit_bytes=MAX_MESSAGE_BYTES)


def _decision_of(data: bytes, key: str) -> _Decision:
    return decode_message(data, _Decision, f"{key}, process 0", limit_bytes=MAX_MESSAGE_BYTES)


def _life(save: SaveId) -> str:
    """Short name of the life between two restores; each demand for a step is a part of it."""
    life = save.incarnation.partition(".")[0]
    return f"vote/{hashlib.sha256(life.encode()).hexdigest()[:12]}"


def _place(save: SaveId) -> str:
    """Return the place of ``save`` in its life: its step, and the part when it is not the first."""
    part = save.incarnation.partition(".")[2]
    return f"{save.step}.{int(part)}" if part else str(save.step)


def _in_order(place: str) -> tuple[int, int]:
    step, _, part = place.partition(".")
    return number_of(step, f"vote {place!r:.60}"), number_of(part or "0", f"vote {place!r:.60}")


def _is_after(place: str, other: str) -> bool:
    """Return True when ``place`` comes after ``other`` in a life; "" comes before all."""
    return bool(place) and _in_order(place) > _in_order(other)


def _has_passed(process: int, place: str) -> str:
    step = place.partition(".")[0]
    return f"process {process} did not save it: it has come to the save of step {step}"


def _name(save: SaveId) -> str:
    return f"{_life(save)}/{_place(save)}"
