"""The two ways in which processes agree: a round, and a cell that is set once.

In a round each member sends one value, and the leader answers. Only the leader reads these values,
so a round of n members takes 2 n calls of the service and a few more. Where the answer differs
between members, there is one key for each eight members. In a cell the first process sets the
value, and that value counts for all.

Guaranteed: a wait ends when the awaited process has announced that it has left, and at a deadline.
The leader always answers: when its rule raises, or a member that it needs does not come, ``learn``
raises an error with that reason. An answer never changes.
Not guaranteed: an answer of a leader that has lost the service. Then the members' own deadlines end
their waits.

Both are built from keys, because the service never forgets the name of a barrier but forgets a key
as soon as the key is deleted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    JOINED_LIMIT_CHARS,
    Coordinator,
    by_process,
    deadline_left_s,
    decode_each,
    decode_message,
    forget,
    joined_errors,
    reason_of,
    run_and_report,
)
from emergency_ckpt.cluster.left_processes import have_left
from emergency_ckpt.core.wording import unexpected_text, valid_text
from emergency_ckpt.errors import (
    CheckpointError,
    CoordinationError,
    DeadlineExceeded,
    DirectoryInUse,
    PeerLeft,
)

Absent = Callable[[Collection[int]], Mapping[int, str]]
"""Returns those of the given processes that have left, each with the reason as a sentence."""
Answer = bytes | Callable[[Collection[int]], bytes]
"""One value for all members, or a function that returns the value for some of them together."""
Rule = Callable[[Mapping[int, bytes], Mapping[int, str]], Answer | None]
"""A pure function of the values sent and of the absent members, both by member; None: wait on."""

_TOLD_LATE_S = 5.0
"""Time that the leader's answer may arrive after the deadline of its wait for the members."""
_NAMED = 8
_MISSING_NAMED = 16
_MEMBERS_OF_A_KEY = 8
_JOINED_BYTES = 64 << 10
"""Where the value of a key is longer, each of the key's members gets a key and value of its own."""
_VALUE, _APART, _ERROR = b"=", b">", b"!"
_FIRST_INSPECTION_S = 1.0
_LONGEST_SLICE_S = 8.0
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_INSPECTIONS_PER_S = 250.0
"""By all processes together. An inspection makes some four calls; the service answers some 2,500 a
second."""


def wait_for_key(
    coordinator: Coordinator,
    key: str,
    timeout_s: float,
    inspect: Callable[[], str] | None = None,
    *,
    prompt: bool = False,
) -> bytes:
    """Return the value of ``key`` once the key is set.

    Args:
      inspect: called at intervals while the key is not set; returns why it never will be, or an
        empty text. After a reason the key is read once more. An error of ``inspect`` ends the
        wait.
      prompt: return as soon as the key is set, at the price of some 15 kB of the service's memory
        for each wait until then. Otherwise the call returns up to two seconds later, or four with a
        thousand processes.

    Raises:
      PeerLeft: ``inspect`` gave a reason. DeadlineExceeded. CoordinationError.
    """
    deadline_s = time.monotonic() + timeout_s
    longest_s = max(_LONGEST_PAUSE_S, coordinator.process_count / _INSPECTIONS_PER_S)
    slice_s, pause_s = _FIRST_INSPECTION_S, _SHORTEST_PAUSE_S
    value: bytes | None = _get_within(coordinator, key, min(timeout_s, slice_s))
    while value is None:
        reason = "" if inspect is None else inspect()
        value = coordinator.find(key)
        if value is not None:
            break
        if reason:
            raise PeerLeft("wait for", key, reason)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("wait for", key, f"not set within {timeout_s:g} s")
        if prompt:
            slice_s = min(2 * slice_s, _LONGEST_SLICE_S)
            value = _get_within(coordinator, key, min(slice_s, left_s))
        else:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)
    return value


def _get_within(coordinator: Coordinator, key: str, timeout_s: float) -> bytes | None:
    try:
        return coordinator.get(key, timeout_s)
    except DeadlineExceeded:
        return None


def nobody(processes: Collection[int]) -> Mapping[int, str]:
    """The ``Absent`` of a round that looks for no process that has left."""
    del processes
    return {}


class _Failed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The leader's error, in the place of an answer.

    Attributes:
      left: members that the leader needs have left; the text is about them.
      missing: the first members that did not come in time; all members read them.
      more: the number of the further ones.
    """

    text: str
    left: bool = False
    missing: tuple[str, ...] = ()
    more: int = 0


class Cell:
    """One key that is set once. All methods block, and none is collective."""

    def __init__(self, coordinator: Coordinator, key: str) -> None:
        self._coordinator = coordinator
        self.key = key

    def settle(self, value: bytes) -> bytes:
        """Set the cell, unless the cell is set; return the value that counts.

        An error of the service is raised where that value is not known; ``value`` may be set then.
        """
        try:
            self._coordinator.put(self.key, value)
        except (CoordinationError, DeadlineExceeded):
            counting = self.find()  # another process's value, or ours after a lost reply
            if counting is None:
                raise
            return counting
        return value

    def find(self) -> bytes | None:
        """Return the value, or None while there is none."""
        return self._coordinator.find(self.key)

    def wait(
        self, timeout_s: float, inspect: Callable[[], str] | None = None, *, prompt: bool = False
    ) -> bytes:
        """Return the value once there is one. As ``wait_for_key``."""
        return wait_for_key(self._coordinator, self.key, timeout_s, inspect, prompt=prompt)


class Series:
    """At the leader: the keys of rounds in which the same members take part, one after the other.

    A member that sends in a round has left all earlier rounds. So when all members have sent, and
    have an answer and wait no longer, the keys of the earlier rounds are deleted.

    Attributes:
      names: of the keys that are there, the oldest first.
      kept: a name whose keys stay, see ``keep``.
    """

    def __init__(self, most: int | None = None) -> None:
        """``most``: at most so many names stay, whatever the members have sent; None: no bound."""
        self._most = most
        self._reached = ""
        self.names: deque[str] = deque()
        self.kept = ""

    def add(self, *names: str) -> None:
        """Note a round, or keys that belong to the last round."""
        self.names.extend(names)

    def all_came_to(self, name: str) -> None:
        """Note that all members have sent their values in the round ``name``."""
        self._reached = name

    def keep(self, coordinator: Coordinator, name: str) -> None:
        """Keep the keys of ``name``, and no longer the keys that were kept before."""
        before, self.kept = self.kept, name
        if before not in ("", name, *self.names):
            forget(coordinator, before)

    def tidy(self, coordinator: Coordinator) -> None:
        """Delete the keys before the newest round in which all have sent, and above the bound."""
        above = 0 if self._most is None else len(self.names) - self._most
        before = self.names.index(self._reached) if self._reached in self.names else 0
        for _ in range(max(above, before)):
            old = self.names.popleft()
            if old != self.kept:
                forget(coordinator, old)


class Round:
    """One question to the ``members``, answered by the ``leader``. All methods block.

    Each process makes its own object, with the same arguments. Every member calls ``say``; then
    the leader calls ``decide`` and the others ``learn``. Any process may call ``learn``.

    Attributes:
      heard: at the leader, the values that the members had sent when the rule answered.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        timeout_s: float,
        *,
        members: Sequence[int] = (),
        leader: int = 0,
        absent: Absent | None = None,
        prompt: bool = False,
        grouped: bool = False,
        series: Series | None = None,
    ) -> None:
        """Make this process's side of a round.

        Args:
          timeout_s: of each wait of this process.
          name: used by no other round. The keys are below it and at ``<name>.told``.
          members: the processes that send a value; all processes of the job by default.
          absent: which processes have left; by default those that have announced it for good.
          prompt: as in ``wait_for_key``.
          grouped: the answer may have another value for each eight members; otherwise one value.
          series: the rounds of all members, whose keys the leader deletes once all have left.
        """
        self._coordinator = coordinator
        self._me = coordinator.process_index
        self._name = name
        self._timeout_s = timeout_s
        self._members = frozenset(members or range(coordinator.process_count))
        self._leader = leader
        self._absent: Absent = absent or (lambda processes: have_left(coordinator, processes))
        self._prompt = prompt
        self._grouped = grouped
        self._series = series if self._me == leader else None
        if self._series is not None:
            self._series.add(name, f"{name}.told")
        self.heard: Mapping[int, bytes] = {}

    def say(self, value: bytes) -> None:
        """Send the leader this member's value. CoordinationError: it has sent another value."""
        cell = Cell(self._coordinator, f"{self._name}/{self._me}")
        if cell.settle(value) != value:
            raise CoordinationError("say", cell.key, "this process has sent another value")

    def said(self) -> dict[int, bytes]:
        """Return the values sent so far, by process. CoordinationError: an unknown sender."""
        values = self._coordinator.list(self._name)
        return by_process(values, self._name, self._coordinator.process_count)

    def hold(self, value: bytes, rule: Rule) -> bytes:
        """Send ``value``, and return the answer, which the leader gives by ``rule``. Collective."""
        self.say(value)
        return self.decide(rule) if self._me == self._leader else self.learn()

    def decide(self, rule: Rule) -> bytes:
        """At the leader: answer by ``rule``, and return this process's part.

        Raises an error of ``rule`` or of ``hear`` after it has been sent to all.
        """
        try:
            return self.tell(self.hear(rule))
        except Exception as error:
            self.fail(error)
            raise

    def hear(self, rule: Rule) -> Answer:
        """At the leader: wait until ``rule`` has an answer; return the answer, without sending it.

        DeadlineExceeded names the members that have sent nothing.
        """
        answer: Answer | None = None
        missing: list[int] = []
        deadline_s = time.monotonic() + self._timeout_s

        def ask(*, is_inspection: bool) -> str:
            nonlocal answer, missing
            # In this order: so a member that has sent and then left counts as having sent.
            absent = self._absent(missing) if is_inspection and missing else {}
            self.heard = said = self.said()
            missing = sorted(self._members - said.keys())
            answer = rule(said, {p: text for p, text in absent.items() if p not in said})
            if answer is None and not missing:
                raise CoordinationError("decide", self._name, "all have sent, without an answer")
            return "" if answer is None else "it is decided"

        ask(is_inspection=False)
        while answer is None:
            # Members come in any order: on average, half are there when the middle one comes.
            key = f"{self._name}/{missing[len(missing) // 2]}"
            left_s = deadline_left_s(deadline_s)
            try:
                wait_for_key(
                    self._coordinator,
                    key,
                    left_s,
                    lambda: ask(is_inspection=True),
                    prompt=self._prompt,
                )
            except PeerLeft:
                if answer is None:
                    raise
            except DeadlineExceeded as error:
                if time.monotonic() < deadline_s:
                    raise  # the service did not answer, or a member makes no progress
                problem = f"not all processes came within {self._timeout_s:g} s"
                named = [f"process {p}" for p in missing]
                raise self._not_all_came(problem, named) from error
            else:
                if answer is None:  # an inspection may have found the answer just before
                    ask(is_inspection=False)
        if self._series is not None and not missing:
            self._series.all_came_to(self._name)
        return answer

    def tell(self, answer: Answer) -> bytes:
        """At the leader: send the members ``answer``; return this process's part.

        CoordinationError: another answer has been sent.
        """
        for cell, members in self._cells():
            value = answer if isinstance(answer, bytes) else answer(members)
            if isinstance(answer, bytes) or len(value) <= _JOINED_BYTES:
                self._settle(cell, _VALUE + value)
                continue
            for process in members:
                self._settle(self._own_cell(process), answer([process]))
            self._settle(cell, _APART)  # last: a member that reads this finds its own value
        if self._series is not None:
            self._series.tidy(self._coordinator)
        return answer if isinstance(answer, bytes) else answer([self._leader])

    def tell_apart(self, name: str, value: bytes) -> None:
        """At the leader, before the answer: send a value that all members read from one key."""
        self._settle(Cell(self._coordinator, self._apart_key(name)), value)

    def learn_apart(self, name: str) -> bytes:
        """Return the value that the leader sent before its answer, which refers to the value."""
        return self._coordinator.get(self._apart_key(name), self._timeout_s)

    def _apart_key(self, name: str) -> str:
        return f"{self._name}.told/apart/{name}"

    def _settle(self, cell: Cell, answer: bytes) -> None:
        if cell.settle(answer) != answer:
            raise CoordinationError("tell", cell.key, "another answer has been sent")

    def fail(self, error: Exception) -> None:
        """At the leader: send ``error``, where no answer has been sent yet. Never raises."""
        text = unexpected_text(error)
        missing: tuple[str, ...] = ()
        more = 0
        if isinstance(error, CheckpointError):
            text = error.problem if isinstance(error, PeerLeft) else str(error)
        if isinstance(error, DeadlineExceeded):
            text, missing = error.reason, error.missing[:_MISSING_NAMED]
            more = error.more + len(error.missing) - len(missing)
        text = valid_text(text, ERROR_LIMIT_CHARS)
        failed = _Failed(text, isinstance(error, PeerLeft), missing, more)
        try:
            for cell, _ in self._cells():
                cell.settle(_ERROR + msgspec.json.encode(failed))
        except CheckpointError as failure:
            logging.warning("the others wait for their deadlines, since %s; %s", text, failure)

    def learn(self) -> bytes:
        """Return the leader's answer to this process.

        Raises:
          PeerLeft: the leader, or a member that it needs, has left. DeadlineExceeded: names the
            members that did not come, or the leader. CoordinationError: the leader failed.
        """
        cell = self._cell(self._me)
        timeout_s = self._timeout_s + _TOLD_LATE_S
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._absent is nobody:
                data = self._coordinator.get(cell.key, timeout_s)  # one wait, and no look
            else:
                data = cell.wait(
                    timeout_s,
                    lambda: self._absent([self._leader]).get(self._leader, ""),
                    prompt=self._prompt,
                )
        except DeadlineExceeded as error:
            if time.monotonic() < deadline_s:
                raise  # the service did not answer, or the leader makes no progress
            raise DeadlineExceeded(
                "wait for",
                cell.key,
                f"the leader has not answered within {timeout_s:g} s",
                missing=[f"process {self._leader}"],
                hint="look at its log",
            ) from error
        name = f"{cell.key}, process {self._leader}"
        if data == _APART and self._grouped:
            return self._coordinator.get(self._own_cell(self._me).key, deadline_left_s(deadline_s))
        if data[:1] == _VALUE:
            return data[1:]
        if data[:1] != _ERROR:
            raise CoordinationError("decode", f"message {name!r}", "it is no answer of a leader")
        failed: _Failed = decode_message(data[1:], _Failed, name)
        if failed.missing:
            raise self._not_all_came(failed.text, failed.missing, failed.more)
        if failed.left:
            raise PeerLeft("wait for", self._name, failed.text)
        problem = f"process {self._leader} failed: {failed.text}"
        raise CoordinationError("agree on", self._name, problem)

    def when_all(self, decide: Callable[[Mapping[int, bytes]], Answer]) -> Rule:
        """Return the rule that needs every member, and answers with ``decide`` of their values.

        The rule raises PeerLeft when a member has left. ``decide`` is called once, and may read and
        wait.
        """

        def rule(said: Mapping[int, bytes], absent: Mapping[int, str]) -> Answer | None:
            if absent:
                problem = "; ".join(text for _, text in sorted(absent.items())[:_NAMED])
                raise PeerLeft("wait for", self._name, problem)
            if not self._members <= said.keys():
                return None
            return decide({process: said[process] for process in sorted(self._members)})

        return rule

    def _cell(self, process: int) -> Cell:
        key = f"{self._name}.told"
        if self._grouped:
            key += f"/{process // _MEMBERS_OF_A_KEY}"
        return Cell(self._coordinator, key)

    def _own_cell(self, process: int) -> Cell:
        return Cell(self._coordinator, f"{self._name}.told/own/{process}")

    def _cells(self) -> list[tuple[Cell, list[int]]]:
        """Return the cells of the answer, each with the members that read the cell."""
        others = sorted(self._members - {self._leader})
        if not self._grouped:
            return [(self._cell(self._leader), others)]
        groups: dict[int, list[int]] = {}
        for process in others:
            groups.setdefault(process // _MEMBERS_OF_A_KEY, []).append(process)
        return [(self._cell(members[0]), members) for members in groups.values()]

    def _not_all_came(
        self, problem: str, missing: Sequence[str], more: int = 0
    ) -> DeadlineExceeded:
        hint = "look at the logs of the missing processes"
        return DeadlineExceeded(
            "gather", self._name, problem, missing=missing, more=more, hint=hint
        )


def agree(
    coordinator: Coordinator, name: str, error: str, timeout_s: float, series: Series | None = None
) -> str:
    """Return the errors of all processes in one line, the same on all; empty without errors.

    Collective. ``error``: this process's own, or an empty text.
    """

    def join(said: Mapping[int, bytes]) -> bytes:
        return joined_errors({p: reason_of(data) for p, data in said.items()}).encode()

    error_round = Round(coordinator, name, timeout_s, prompt=True, series=series)
    own = valid_text(error, JOINED_LIMIT_CHARS).encode()
    return reason_of(error_round.hold(own, error_round.when_all(join)))


class _Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error and the last preemption check of one process, and in the end of all.

    ``in_use``: target, problem and hint, where the error is DirectoryInUse.
    """

    error: str
    number: int
    in_use: tuple[str, str, str] | None = None


class SharedNumber(Protocol):
    """A number that each process counts, and that goes on alike on all of them."""

    @property
    def last_number(self) -> int:
        """The newest number of this process."""
        ...

    def go_on_from(self, number: int) -> None:
        """Count on from ``number``, the greatest of all processes."""
        ...


def run_on_all(
    coordinator: Coordinator,
    name: str,
    work: Callable[[], object],
    counter: SharedNumber,
    timeout_s: float,
    series: Series | None = None,
) -> str:
    """Run ``work``, wait until all processes have, and return the others' errors. Collective.

    Raises this process's own error, as a CheckpointError, and DirectoryInUse of any process. The
    result is empty without errors. ``counter``: goes on from one number on all processes.
    ``series``: as of ``Round``.
    """

    def tell(error: CheckpointError | None) -> _Ready:
        in_use: tuple[str, str, str] | None = None
        if isinstance(error, DirectoryInUse):
            in_use = _cut(error.target), _cut(error.problem), _cut(error.hint)
        own = _Ready(_cut(str(error or "")), counter.last_number, in_use)
        ready_round = Round(coordinator, name, timeout_s, prompt=True, series=series)
        data = ready_round.hold(
            msgspec.json.encode(own), ready_round.when_all(lambda said: _together(said, name))
        )
        together: _Ready = decode_message(data, _Ready, f"{name}.told")
        counter.go_on_from(together.number)
        return together

    together = run_and_report(work, tell)
    if together.in_use is not None:
        target, problem, hint = together.in_use
        raise DirectoryInUse("save in", target, problem, hint=hint)
    return together.error


def leave_together(coordinator: Coordinator, timeout_s: float) -> None:
    """Wait until all processes have called this function. A failure is logged.

    The first exit could get the other processes killed, or end the coordination service.
    """
    try:
        last_round = Round(coordinator, "preempted", timeout_s, prompt=True)
        last_round.hold(b"", last_round.when_all(lambda _: b""))
    except CheckpointError as error:
        logging.warning("not all processes finished in time after the notice: %s", error)


def _cut(text: str) -> str:
    return valid_text(text, ERROR_LIMIT_CHARS)


def _together(messages: Mapping[int, bytes], name: str) -> bytes:
    reports = decode_each(messages, _Ready, name, lambda text: _Ready(text, 0))
    errors = joined_errors({p: report.error for p, report in reports.items()})
    number = max(report.number for report in reports.values())
    in_use = next((report.in_use for report in reports.values() if report.in_use), None)
    return msgspec.json.encode(_Ready(errors, number, in_use))
