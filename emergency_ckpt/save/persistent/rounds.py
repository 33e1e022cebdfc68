"""Reports, rounds and outcomes: the messages between the processes of a persistent save.

Keys are ``persist/<incarnation>/<step>/<stage>/<process>``. Each stage is a round of the writers,
which the first writer leads. Only the first writer knows whether the marker was written, so the
first writer sets the outcome, one value, for which all others wait in the background.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from absl import logging

from emergency_ckpt.cluster.coordination import Coordinator, deadline_left_s, decode_message
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.round import Answer, Cell, Round, Rule, Series
from emergency_ckpt.core.limits import MAX_PLAN_MESSAGE_BYTES, ProcessIndex
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import (
    CheckpointError,
    DeadlineExceeded,
    PeerLeft,
    PersistentTierError,
)
from emergency_ckpt.storage.meetings import BEGUN
from emergency_ckpt.types import PERSISTENT, SaveId, ShardId

FIRST_STAGE = "host_states"
DOCUMENTS = "documents"
TENSORS = "tensors"
_KEPT_REFUSALS = 2
_AGAIN_S = 1.0
"""Pause before an outcome is published or asked for again, after a failed call."""
_SAVES = 2
"""A wait for the outcome lasts so many timeouts: the first writer may begin one save later."""
LeftOut = Literal["", "paused", "late"]
"""Why all processes leave a save out, which is no failure; empty for a failure."""
REPORT_LIMIT_CHARS = 500
"""Maximum length of an error text in a ``StageReport``."""


class StageReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Report of one writer on one stage.

    The first writer's answer is a ``StageReport`` too, with the first failure or none.

    Attributes:
      left_out: "paused": the first writer makes a pause after failed saves. "late": a process
        knew too late that the step was to be saved.
      documents: by owner, SHA-256 (hex) of each host state that this writer has stored, and
        whether the host state is empty.
      crcs: CRC32C of each shard of this writer's part of the tensors.
      kept: from the first writer: storage has the step already.
      steps: from the first writer, in the outcome: the steps that storage keeps, oldest first.
      attempt: from the first writer: the name of this attempt.
    """

    error: str = ""
    left_out: LeftOut = ""
    documents: dict[ProcessIndex, tuple[str, bool]] = {}
    crcs: tuple[tuple[ShardId, int], ...] = ()
    kept: bool = False
    steps: tuple[int, ...] = ()
    attempt: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,16}\Z")] = ""

    def named(self, process: int) -> StageReport:
        """Return the answer that reports this failure, with the name of its ``process``."""
        return StageReport(f"process {process} failed: {self.error}", self.left_out)


class SaveLeftOut(PersistentTierError):
    """All leave this save out, which is no failure; ``cause`` as ``StageReport.left_out``."""

    def __init__(self, operation: str, target: str, problem: str, *, cause: LeftOut) -> None:
        super().__init__(operation, target, problem)
        self.cause: LeftOut = cause


def raise_failure(report: StageReport, step: int) -> None:
    """Raise PersistentTierError or SaveLeftOut where ``report`` has an error."""
    if report.error and report.left_out:
        raise SaveLeftOut("save", f"step {step}", report.error, cause=report.left_out)
    if report.error:
        raise PersistentTierError("save", f"step {step}", report.error)


def failure_of(error: Exception) -> StageReport:
    """Return the report of a process whose save ``error`` has ended."""
    cause = error.cause if isinstance(error, SaveLeftOut) else ""
    return StageReport(valid_text(text_of(error), REPORT_LIMIT_CHARS), cause)


def report_of(data: bytes, stage: str, step: int, writer: int) -> StageReport:
    """Return the report of ``writer`` on ``stage``. CoordinationError: it cannot be decoded."""
    what = f"{stage} of step {step}, process {writer}"
    return decode_message(data, StageReport, what, limit_bytes=MAX_PLAN_MESSAGE_BYTES)


def agreed_crcs(every: Sequence[StageReport]) -> tuple[dict[ShardId, int], list[ShardId]]:
    """Return one CRC for each shard, and the shards whose copies differ.

    A shard whose copies differ gets no CRC: which copy Orbax took is unknown.
    """
    crcs: dict[ShardId, int] = {}
    differing: set[ShardId] = set()
    for part in every:
        for shard, crc in part.crcs:
            if crcs.setdefault(shard, crc) != crc:
                differing.add(shard)
    for shard in differing:
        del crcs[shard]
    return crcs, sorted(differing)


def text_of(error: Exception) -> str:
    """Return a text that is never empty: to the others an empty text means success."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class StorageRounds:
    """The messages of one process about its persistent saves.

    For the background thread, except where any thread is named. A process that is late for a save
    reports that from another thread (``refuse``, or the first stage), perhaps beside another save.

    Attributes:
      is_learning: this process has done its part and waits for the first writer. For any thread.
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
        self._saves = Series()
        self._refusals = Series(_KEPT_REFUSALS)
        self._noting = threading.Lock()  # of keys in these series
        self._ending = threading.Event()
        self.is_learning = False
        self._check: Callable[[Collection[int]], None] = lambda _: None
        self._is_announced = False

    def begin(
        self,
        save: SaveId,
        check: Callable[[Collection[int]], None],
        *,
        is_announced: bool = False,
    ) -> None:
        """Report that this process begins ``save``, and takes part in no earlier save any more.

        ``check``: called now and then with the processes that this process waits for; may raise.
        ``is_announced``: a process may begin a later save before it reads that ``save`` was due.
        """
        self._check = check
        self._is_announced = is_announced
        self._left_processes.come_to(PERSISTENT, save)

    def absent(self, save: SaveId, processes: Collection[int]) -> dict[int, str]:
        """Return which of ``processes`` take no part in ``save``, each with a sentence."""
        absent = self._left_processes.absent(PERSISTENT, save, processes)
        if not absent:
            self._check(processes)
        return absent

    def raise_if_late(self, save: SaveId, absent: Mapping[int, str]) -> None:
        """SaveLeftOut where all that are ``absent`` learned too late that ``save`` was due.

        For who has read since then what these have sent: a process that has failed says so, and
        may begin its next save at once.
        """
        if absent and self._is_announced:
            passed = self._left_processes.passed(PERSISTENT, save, absent.keys())
            if absent.keys() == passed.keys():
                reason = "; ".join(absent.values())
                raise SaveLeftOut("save", f"step {save.step}", reason, cause="late")

    def stage(self, save: SaveId, stage: str, writers: Sequence[int]) -> Round:
        """Begin a round of the ``writers``, which the first writer leads."""
        if self._coordinator.process_index == writers[0] and stage == FIRST_STAGE:
            with self._noting:
                if _prefix(save) not in self._saves.names:
                    self._saves.add(_prefix(save))
        return Round(
            self._coordinator,
            f"{_prefix(save)}/{stage}",
            self._timeout_s,
            members=writers,
            leader=writers[0],
            absent=lambda processes: self.absent(save, processes),
        )

    def rule_of(self, save: SaveId, stage: str, stage_round: Round, first_writer: int) -> Rule:
        """Return the rule of a stage: it answers the first failure at once, or success of all.

        The rule raises SaveLeftOut or PeerLeft when a writer takes no part (any more), and
        CoordinationError for a value that is no report.
        """

        def all_well(said: Mapping[int, bytes]) -> bytes:
            first = report_of(said[first_writer], stage, save.step, first_writer)
            return msgspec.json.encode(StageReport(kept=first.kept, attempt=first.attempt))

        def rule(said: Mapping[int, bytes], absent: Mapping[int, str]) -> Answer | None:
            for process, data in sorted(said.items()):
                report = report_of(data, stage, save.step, process)
                if report.error:
                    return msgspec.json.encode(report.named(process))
            self.raise_if_late(save, absent)
            return stage_round.when_all(all_well)(said, absent)

        return rule

    def say_first(self, save: SaveId, report: StageReport) -> None:
        """Send ``report`` in the first stage, as a process that does not know the writers."""
        name = f"{_prefix(save)}/{FIRST_STAGE}"
        Round(self._coordinator, name, self._timeout_s).say(msgspec.json.encode(report))

    def tidy(self, writers: Collection[int]) -> None:
        """At the first writer: delete the keys of saves that no writer takes part in any more.

        A writer that has begun a save is done with all earlier saves, whatever their outcomes.
        Never raises: where a call fails, the keys stay until a later save, or for ever.
        """
        with self._noting, contextlib.suppress(CheckpointError):
            for name in reversed(list(self._saves.names)[1:]):
                first = Round(self._coordinator, f"{name}/{FIRST_STAGE}", self._timeout_s)
                if set(writers) <= first.said().keys():
                    self._saves.all_came_to(name)
                    break
            self._saves.tidy(self._coordinator)

    # Host states that are sent to a writer.

    def refuse(self, save: SaveId, report: StageReport) -> None:
        """Tell the writer of this process's host state why the host state will not come."""
        # A refusal that comes after the first writer has deleted the save's keys would never be
        # deleted there.
        with self._noting:
            self._refusals.add(f"{_prefix(save)}/refused/{self._coordinator.process_index}")
            self._refusals.tidy(self._coordinator)
        self._refused(save).say(msgspec.json.encode(report))

    def check_sent(self, save: SaveId, owners: Collection[int]) -> None:
        """SaveLeftOut or PersistentTierError where one of ``owners`` will not send its part."""
        absent = self.absent(save, owners)
        refused = self._refused(save).said()
        for owner in sorted(refused.keys() & set(owners)):
            report = report_of(refused[owner], "refusal", save.step, owner)
            if report.left_out:
                raise_failure(report.named(owner), save.step)
            problem = f"process {owner} cannot send its own: {report.error}"
            raise PersistentTierError("collect", f"host states of step {save.step}", problem)
        self.raise_if_late(save, absent)
        for reason in absent.values():
            raise PersistentTierError("collect", f"host states of step {save.step}", reason)

    def _refused(self, save: SaveId) -> Round:
        return Round(self._coordinator, f"{_prefix(save)}/refused", self._timeout_s)

    # The outcome.

    def _outcome(self, save: SaveId) -> Cell:
        return Cell(self._coordinator, f"{_prefix(save)}/outcome")

    def decide(self, save: SaveId, outcome: StageReport) -> None:
        """Publish how ``save`` ended: for the first writer. CheckpointError if that fails.

        A failed try is repeated, since all others report a step that counts as failed where they
        do not learn that it counts. The outcome of a failed save raises no error: those who wait
        run into their deadline.
        """
        cell, data = self._outcome(save), msgspec.json.encode(outcome)
        deadline_s = time.monotonic() + self._timeout_s
        try:
            self._repeat(lambda: cell.settle(data), deadline_s, f"tell how step {save.step} ended")
        except CheckpointError:
            if not outcome.error:
                raise

    def learn(self, save: SaveId, first_writer: int) -> StageReport:
        """Wait for the outcome of ``save``, and return it when ``save`` is complete.

        PersistentTierError when ``save`` failed, SaveLeftOut when it was left out; DeadlineExceeded
        when there is no outcome; CoordinationError when this process cannot ask for the outcome
        until the deadline.
        """

        def inspect() -> str:
            if self._ending.is_set():
                return "this process ends"
            return self.absent(save, [first_writer]).get(first_writer, "")

        deadline_s = time.monotonic() + _SAVES * self._timeout_s

        def ask() -> bytes:
            return self._outcome(save).wait(deadline_left_s(deadline_s), inspect)

        self.is_learning = True
        try:
            # For all others the step may be complete, so one failed call does not end the wait.
            data = self._repeat(ask, deadline_s, f"learn how step {save.step} ended")
        except (DeadlineExceeded, PeerLeft) as error:
            raise DeadlineExceeded(
                "learn the outcome of",
                f"step {save.step} in the persistent tier",
                f"the first writer has not reported whether it is complete: {error.problem}",
                missing=[f"process {first_writer}"],
            ) from error
        finally:
            self.is_learning = False
        report = report_of(data, "outcome", save.step, first_writer)
        if report.error:
            report = report.named(first_writer)
        raise_failure(report, save.step)
        return report

    def _repeat(self, ask: Callable[[], bytes], deadline_s: float, purpose: str) -> bytes:
        """Return the answer of the service; ask again after an error of ``ask``.

        The error is raised at the deadline, at the end of this process, and for a peer that left.
        """
        while True:
            try:
                return ask()
            except PeerLeft:
                raise
            except CheckpointError as error:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._ending.wait(min(_AGAIN_S, left_s)):
                    raise
                logging.warning("asks the service again, to %s: %s", purpose, error)

    def end_waits(self) -> None:
        """End all waits for outcomes, now and later. From any thread."""
        self._ending.set()


class WriterMeetings:
    """One round, which the first writer's answer begins and the reports of all writers end.

    The answer announces that the folders are made. A writer that has failed reports that, so that
    the others do not run into their deadline.
    """

    def __init__(
        self,
        rounds: StorageRounds,
        save: SaveId,
        writers: Sequence[int],
        *,
        is_first: bool,
        before_commit: Callable[[], None],
    ) -> None:
        """``before_commit`` is called at the first writer when all have written; it may raise."""
        self._save = save
        self._first = writers[0]
        self._is_first = is_first
        self._before_commit = before_commit
        self._round = rounds.stage(save, TENSORS, writers)
        self._rule = rounds.rule_of(save, TENSORS, self._round, writers[0])
        self._has_said = False
        self._is_over = False

    def meet(self, name: str) -> None:
        """As ``meetings.Meet``; PersistentTierError when another writer has failed."""
        if self._is_over:
            step = f"step {self._save.step}"
            raise PersistentTierError("save", step, "this process has given it up")
        if name != BEGUN:
            self._say("")
            if self._is_first:
                self._check(self._round.hear(self._rule))
                self._before_commit()
        elif self._is_first:
            self._round.tell(msgspec.json.encode(StageReport()))
        else:
            self._check(self._round.learn())

    def leave(self, reason: str) -> None:
        """Tell the others that this process has failed, and take part in no more meetings.

        Never raises: where a call fails, the others run into their deadline.
        """
        self._is_over = True
        if self._is_first:
            self._round.fail(PersistentTierError("save", f"step {self._save.step}", reason))
        try:
            self._say(reason)
        except CheckpointError as error:
            logging.warning(
                "the others do not learn that step %d failed: %s", self._save.step, error
            )

    def _say(self, error: str) -> None:
        if not self._has_said:
            error = valid_text(error, REPORT_LIMIT_CHARS)
            self._round.say(msgspec.json.encode(StageReport(error)))
            self._has_said = True

    def _check(self, answer: object) -> None:
        assert isinstance(answer, bytes), "the answer of this round is one for all members"
        raise_failure(report_of(answer, TENSORS, self._save.step, self._first), self._save.step)


def _prefix(save: SaveId) -> str:
    return f"persist/{save.incarnation}/{save.step}"


def beats_of(save: SaveId) -> str:
    """Return the name of the keys by which the writers of ``save`` report progress."""
    return f"{_prefix(save)}/beats"
