"""The thread that agrees with other processes on steps to save; see ``core.save.step_agreement``.

The training thread shares one small object in memory with it and calls nothing that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from emergency_ckpt.background import Failures
from emergency_ckpt.cluster.coordination import Coordinator, by_process, decode_message, number_of
from emergency_ckpt.cluster.left_processes import leaving
from emergency_ckpt.cluster.round import Series
from emergency_ckpt.core.limits import MAX_MESSAGE_BYTES
from emergency_ckpt.core.save.step_agreement import (
    Answer,
    Decision,
    Due,
    Follower,
    Leader,
    Proposal,
    StepClock,
    before_first_step,
)
from emergency_ckpt.errors import CheckpointError, CoordinationError, DeadlineExceeded, SaveFailed
from emergency_ckpt.types import TierName

if TYPE_CHECKING:
    from emergency_ckpt.save.schedule import TierSchedule

_SLICE_S = 0.5
_INSPECTION_PAUSE_S = 0.25
_PATIENCE_S = 1.0
_LEFT_PAUSE_S = 5.0
_READY_WAIT_S = 0.05
_SHORTEST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_BUSY_PAUSE_S = 0.02
_FAILED_PAUSE_S = 1.0
_KEPT_KEYS = 3 * 16
"""Three for each proposal."""
_KEPT_DECISIONS = 256


class Choice(NamedTuple):
    """A step to propose; ``waits`` and ``exact`` as in ``Proposal``."""

    step: int
    waits: bool
    exact: bool = False


class SaveAgreement:
    """One agreement: from a restore, or the start, to the next.

    ``arrive`` belongs to the training thread and never waits for anyone; ``decision_on`` to the
    background threads of the saves; ``stop`` to whoever owns the object.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        tiers: Mapping[TierName, TierSchedule],
        failures: Failures,
        *,
        timeout_s: float,
    ) -> None:
        """``name`` is used by no other one; the thread starts with the first step."""
        self._coordinator = coordinator
        self._name = name
        self._tiers = tiers
        self._failures = failures
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._follower = Follower()
        self._clock = StepClock()
        self._decisions: dict[int, bool] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._leads = coordinator.process_index == 0
        self._keys = Series(_KEPT_KEYS)
        self._newest: int | None = None
        self._has_logged = False
        self._waited_for = ""

    def arrive(self, step: int) -> tuple[Due, ...]:
        """The training thread has reached ``step``; returns what is to be saved here."""
        with self._changed:
            if self._leads:
                self._clock.arrive(step, time.monotonic())
                self._newest = step
            due = self._follower.arrive(step)
        self._start()
        return due

    def expect(self, step: int) -> None:
        """The step after ``step`` is the next. Agrees on the first ones before they come."""
        with self._changed:
            self._newest = step
        self._start()

    def _start(self) -> None:
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(
                target=self._run, name="eckpt-save-agreement", daemon=True
            )
            self._thread.start()

    def decision_on(self, number: int, timeout_s: float) -> bool | None:
        """Return the leader's decision on a proposal. Waits; None when it does not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._decisions or self._stopping.is_set(), timeout_s
            )
            return self._decisions.get(number)

    def stop(self) -> None:
        """End the thread; waits for it, about half a second at most."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(4 * _SLICE_S)

    def _run(self) -> None:
        turn = self._lead if self._leads else self._follow
        state = Leader(self._coordinator.process_count, self._timeout_s), [0]
        while not self._stopping.is_set():
            try:
                turn(*state)
            except Exception as error:  # noqa: BLE001 - recorded, raised by check_for_errors
                if self._stopping.is_set():
                    return
                failure = SaveFailed(
                    "agree on", "a step to save", f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._failures.record(failure)
                self._stopping.wait(_FAILED_PAUSE_S)

    # The leader.

    def _lead(self, leader: Leader, next_number: list[int]) -> None:
        """Propose and decide once, or find that nothing is due."""
        del next_number
        with self._changed:
            measured, newest = self._clock.progress, self._newest
        if measured is None and newest is None:
            self._stopping.wait(_LONGEST_POLL_S / 10)
            return
        progress = measured or before_first_step(newest or 0, time.monotonic())
        for tier, agreed in self._tiers.items():
            first = leader.first_step(progress, time.monotonic())
            choose = agreed.choose_first if measured is None else agreed.choose_step
            choice = choose(progress, first, leader.lead_s)
            if choice is None:
                continue
            now_s = time.monotonic()
            proposal = leader.propose(
                tier, choice.step, now_s, waits=choice.waits, exact=choice.exact
            )
            self._decide(leader, proposal)
            return
        pause_s = min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, progress.step_time_s / 4))
        self._stopping.wait(pause_s)

    def _decide(self, leader: Leader, proposal: Proposal) -> None:
        number, tier = proposal.number, self._tiers[proposal.tier]
        answers = {0: self._answer(proposal)}
        if answers[0].kind != "accepted":
            leader.withdraw(time.monotonic())
            return
        self._keys.add(*(self._key(kind, number) for kind in ("proposal", "answer", "decision")))
        try:
            self._coordinator.put(self._key("proposal", number), msgspec.json.encode(proposal))
            decision = self._gather(leader, proposal, answers)
        except CheckpointError as error:
            decision = leader.abandon(str(error))
            self._failures.record(error)
        # When this fails no process learns the decision: all that accepted save; the vote decides.
        self._coordinator.put(self._key("decision", number), msgspec.json.encode(decision))
        if decision.confirmed:
            tier.agreed(proposal.step, max(answer.stall_s for answer in answers.values()))
        self._note_decision(number, decision)
        self._keys.tidy(self._coordinator)
        if any(answer.kind == "busy" for answer in answers.values()):
            self._stopping.wait(_BUSY_PAUSE_S)

    def _gather(self, leader: Leader, proposal: Proposal, answers: dict[int, Answer]) -> Decision:
        inspects_s = time.monotonic() + _SLICE_S
        while not self._stopping.is_set():
            if time.monotonic() > inspects_s:
                inspects_s += _SLICE_S
                left = [t for p, t in leaving(self._coordinator).items() if p not in answers]
                if left:
                    return self._without(leader, "; ".join(left))
            if len(answers) < self._coordinator.process_count:
                answers |= self._answers(proposal.number)
            with self._changed:
                own_step = self._follower.step or 0
            decision = leader.decide(answers, own_step, time.monotonic())
            if decision is not None:
                return decision
            self._stopping.wait(_SHORTEST_POLL_S)
        return leader.abandon("the leader is stopping")

    def _answers(self, number: int) -> dict[int, Answer]:
        """Answers of the others so far; CoordinationError: one that is none."""
        key = self._key("answer", number)
        found = by_process(self._coordinator.list(key), key, self._coordinator.process_count)
        return {
            p: decode_message(data, Answer, f"{key}/{p}", limit_bytes=MAX_MESSAGE_BYTES)
            for p, data in found.items()
            if p != 0
        }

    def _without(self, leader: Leader, reason: str) -> Decision:
        """End all saves, with one error, unless this process ends as well."""
        if not self._stopping.wait(_LEFT_PAUSE_S) and not self._has_logged:
            self._has_logged = True
            hint = "restart the job; it finds the newest complete step"
            self._failures.record(SaveFailed("agree on", "a step to save", reason, hint=hint))
        return leader.abandon(reason)

    # The followers.

    def _follow(self, leader: Leader, next_number: list[int]) -> None:
        """Answer the next proposal and learn the decision on it."""
        del leader
        number = next_number[0]
        data = self._await("proposal", number, _PATIENCE_S)
        if data is None:
            # The proposal may have been made and removed while this process was stopped.
            found = self._coordinator.list(f"{self._name}/proposal")
            numbers = [number_of(n, f"{self._name}/proposal") for n in found]
            later = [n for n in numbers if n > number]
            if later and str(number) not in found:
                next_number[0] = min(later)
            return
        next_number[0] += 1
        try:
            proposal = self._proposal(data, number)
            answer = self._answer(proposal)
        except CoordinationError as error:
            # The leader waits for an answer; this process never saves what was proposed.
            self._failures.record(error)
            answer = Answer("late", self._follower.step or 0)
        key = f"{self._key('answer', number)}/{self._coordinator.process_index}"
        try:
            self._coordinator.put(key, msgspec.json.encode(answer))
        except CoordinationError as error:
            # The decision will be no, and this process must learn it.
            self._failures.record(error)
        deadline_s = time.monotonic() + self._timeout_s
        while not self._stopping.is_set() and time.monotonic() < deadline_s:
            try:
                data = self._await("decision", number, deadline_s - time.monotonic())
            except CoordinationError as error:
                self._failures.record(error)
                self._stopping.wait(_FAILED_PAUSE_S)
                continue
            if data is not None:
                name = f"{self._key('decision', number)}, process 0"
                decision: Decision = decode_message(
                    data, Decision, name, limit_bytes=MAX_MESSAGE_BYTES
                )
                self._note_decision(number, decision)
                return

    def _proposal(self, data: bytes, number: int) -> Proposal:
        name = f"{self._key('proposal', number)}, process 0"
        proposal: Proposal = decode_message(data, Proposal, name, limit_bytes=MAX_MESSAGE_BYTES)
        if proposal.number != number or proposal.tier not in self._tiers:
            problem = "its number or its tier is another one"
            raise CoordinationError("decode", f"message {name!r}", problem)
        return proposal

    def _await(self, kind: str, number: int, timeout_s: float) -> bytes | None:
        """Return what the leader says; None when it does not, or this process is stopping.

        One ``get`` for each key: all that run into their deadline cost the service memory.
        """
        key, deadline_s = self._key(kind, number), time.monotonic() + timeout_s
        try:
            if key != self._waited_for:
                return self._coordinator.get(key, _SLICE_S)
        except DeadlineExceeded:
            self._waited_for = key
        while not self._stopping.wait(_INSPECTION_PAUSE_S) and time.monotonic() < deadline_s:
            data = self._coordinator.find(key)
            if data is not None:
                return data
        return None

    # Both.

    def _answer(self, proposal: Proposal) -> Answer:
        tier = self._tiers[proposal.tier]
        ready = proposal.waits or tier.is_ready(_READY_WAIT_S)
        with self._changed:
            return self._follower.offer(proposal, ready=ready, stall_s=tier.stall_s)

    def _note_decision(self, number: int, decision: Decision) -> None:
        with self._changed:
            self._follower.on_decision(number, confirmed=decision.confirmed)
            self._decisions[number] = decision.confirmed
            self._decisions.pop(number - _KEPT_DECISIONS, None)
            self._changed.notify_all()

    def _key(self, kind: str, number: int) -> str:
        return f"{self._name}/{kind}/{number}"
