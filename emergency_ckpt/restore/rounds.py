"""The rounds of one restore: each process reports how far it is, and gets what all do next.

1. First each process reports what its RAM has and which state it wants (``Report``); then how its
   part of the previous answer went (``Status``).
2. The leader's answer is a choice of a step, again after each failure, or the end of the restore.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Literal, Protocol

import msgspec

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    Coordinator,
    deadline_left_s,
    decode_message,
)
from emergency_ckpt.cluster.left_processes import have_left
from emergency_ckpt.cluster.round import Round, Series
from emergency_ckpt.core.limits import MAX_PLAN_MESSAGE_BYTES
from emergency_ckpt.core.restore.inventory import (
    HolderInventory,
    Quarantined,
    RestoredSave,
    persistent_unreadable,
    persistent_unusable,
)
from emergency_ckpt.core.restore.leaves import compare_targets
from emergency_ckpt.core.restore.plan_types import CommonPart, NoPlan, RestorePlan
from emergency_ckpt.core.wording import processes_text, valid_text
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    HolderUnreachable,
    PersistentTierError,
    RestoreFailed,
    StorageUnreachable,
)
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.restore.shards import CopiesFailed
from emergency_ckpt.restore.storage_load import LoadPlan
from emergency_ckpt.types import LeafSpec

_MOST_NAMED = 8
_LEADER_LIMIT_CHARS = 4000
_COMMON = "common"


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inventory of one process, the step that the process asks for, and a digest of its state.

    Attributes:
      needs: the sorted names of the sets of shards that the process needs; None where these are not
        known.
      step: None: the newest complete step.
      damaged: by digest, shards of its own copies that it found damaged before.
      restored: the saves from which the newest lives began, by its records.
    """

    inventory: HolderInventory
    state_digest: str
    wants_host_state: bool
    needs: tuple[str, ...] | None = None
    step: int | None = None
    damaged: dict[str, tuple[int, ...]] = {}
    restored: tuple[RestoredSave, ...] = ()


FailureKind = Literal["failed", "holder", "storage"]
"""Cause that ends a restore: a fault, or a holder of copies in RAM, or storage, out of reach."""


class Status(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outcome of one process's part of an answer.

    ``unusable`` names copies that failed. The leader leaves these copies out and chooses anew. An
    ``error`` with nothing unusable ends the restore on all processes.

    Attributes:
      lacks_room: the process has its part, but its RAM has no room for the shards that it keeps.
    """

    error: str = ""
    unusable: tuple[Quarantined, ...] = ()
    kind: FailureKind = "failed"
    lacks_room: bool = False


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The message of one process in a round.

    Attributes:
      report: at first, and after a step was loaded into RAM; None while the last report is valid.
    """

    status: Status = Status()
    report: Report | None = None


class AllDone(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """All processes have their part. The job saves under ``incarnation`` from now on.

    Attributes:
      all_kept: each process has in its RAM all shards that it keeps, and needs no other's old slot.
    """

    incarnation: str
    all_kept: bool = True


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The restore, or the survey, ends with an error on all processes.

    Attributes:
      kind: that of all processes that ended the restore, if they have the same, else ``failed``.
      target: what could not be restored.
    """

    error: str
    kind: FailureKind = "failed"
    target: str = "the job"


def refuse(coordinator: Coordinator, name: str, series: Series, error: Exception) -> None:
    """Report to the others that this process cannot begin its part of the restore ``name``.

    Does not block. A coordination error is not raised, because the caller's error matters more.
    """
    text = valid_text(f"{type(error).__name__}: {error}", ERROR_LIMIT_CHARS)
    try:
        first = Round(coordinator, f"{name}/0", 0.0, grouped=True, series=series)
        first.say(msgspec.json.encode(Row(Status(text))))
        if coordinator.process_index == 0:
            first.tell(msgspec.json.encode(Failed(f"process 0: {text}")))
    except CheckpointError as failure:
        error.add_note(f"The other processes got no report of this: {failure}")


def status_of(error: Exception, plan: RestorePlan | LoadPlan) -> Status:
    """Return the status that reports ``error``, with which this process's part of ``plan`` failed.

    The status names the copies to blame: a whole step in storage, or single copies in RAM.
    """
    if isinstance(error, CopiesFailed):
        return Status(valid_text(str(error), ERROR_LIMIT_CHARS), error.unusable)
    text = valid_text(str(error), ERROR_LIMIT_CHARS)
    is_corrupt = isinstance(error, CorruptData)
    lacks = isinstance(error, PersistentTierError) and not error.unreachable
    if lacks or (is_corrupt and isinstance(plan, LoadPlan)):
        unusable = (persistent_unusable(plan.step),)
        is_passing = isinstance(error, PersistentTierError) and error.retryable
        return Status(
            text, unusable if is_passing else (*unusable, persistent_unreadable(plan.step))
        )
    if is_corrupt:
        return Status(text)
    text = valid_text(f"{type(error).__name__}: {error}", ERROR_LIMIT_CHARS)
    return Status(text, kind=_failure_kind(error))


def _failure_kind(error: Exception) -> FailureKind:
    match error:
        case HolderUnreachable():
            return "holder"
        case PersistentTierError(unreachable=True, retryable=True):
            return "storage"
        case _:
            return "failed"


def _failure_of(kind: FailureKind, target: str, problem: str) -> RestoreFailed:
    """Return the error that every process raises."""
    match kind:
        case "holder":
            hint = f"{_UNREACHABLE_HINT}. {_SILENCE_HINT}"
            return HolderUnreachable("restore", target, problem, hint=hint)
        case "storage":
            return StorageUnreachable("restore", target, problem, hint=_UNREACHABLE_HINT)
        case "failed":
            hint = "no process has restored anything"
            return RestoreFailed("restore", target, problem, hint=hint)


_UNREACHABLE_HINT = (
    "no process has restored anything; restore again: what cannot be reached is not lost."
    " An older step is taken only when it is asked for by its number"
)
_SILENCE_HINT = (
    "A peer may be silent for half of stall_timeout_s, at most 30 s, nothing may move for all of"
    " stall_timeout_s, and JAX aborts the job after heartbeat_timeout_seconds"
    " (of jax.distributed.initialize)"
)


Next = RestorePlan | LoadPlan | NoPlan | AllDone
"""What all processes do next."""
Answer = Next | Failed | CompleteSteps


class Leader(Protocol):
    """Decides at process 0, from the rows of all processes; see ``leader.RestoreLeader``."""

    def answer(self, rows: Mapping[int, Row]) -> Answer:
        """Return what all processes do next."""
        ...

    def survey(self, rows: Mapping[int, Row]) -> CompleteSteps:
        """Return the complete steps."""
        ...


class RestoreRounds:
    """One process's side of one restore, or of one survey.

    Args:
      name: of this restore, the same on all processes.
      series: the rounds of all restores, to which these are added.
      leaves: those that this process asks for, by path.
      leader: gives the answers, in process 0; not used elsewhere.
      deadline_s: of ``time.monotonic``; DeadlineExceeded after it.
      step: that this process asks for; None: the newest complete one.
      check: called at intervals of some seconds with the processes that this process waits for; an
        error that it raises ends the wait.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        series: Series,
        leaves: Mapping[str, LeafSpec],
        leader: Leader | None,
        *,
        deadline_s: float,
        step: int | None = None,
        check: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._series = series
        self._leaves = leaves
        self._specs = msgspec.json.encode(list(leaves.values()))
        self._state_digest = hashlib.sha256(self._specs).hexdigest()
        self._leader = leader
        self._leader_error: CheckpointError | None = None
        self._deadline_s = deadline_s
        self._step = step
        self._check = check
        self._held = 0

    def report(
        self,
        inventory: HolderInventory,
        *,
        wants_host_state: bool,
        needs: tuple[str, ...] | None = None,
        damaged: dict[str, tuple[int, ...]] | None = None,
        restored: tuple[RestoredSave, ...] = (),
    ) -> Row:
        """Return the row that reports what this process has and wants."""
        digest, step = self._state_digest, self._step
        report = Report(inventory, digest, wants_host_state, needs, step, damaged or {}, restored)
        return Row(report=report)

    def hold(self, row: Row) -> Next:
        """Send ``row``; return the answer, with this process's part of it. Collective; blocks.

        Raises the error that ends the restore, on all processes. At the leader, a fault is raised
        as the error that it was.
        """
        answer = self._hold(row, is_survey=False)
        if not isinstance(answer, Failed):
            assert not isinstance(answer, CompleteSteps), "only a survey asks for these"
            return answer
        failure = _failure_of(answer.kind, answer.target, answer.error)
        if answer.kind != "failed":
            raise failure from self._leader_error
        raise self._leader_error or self._with_own_leaves(failure)

    def survey(self, row: Row) -> CompleteSteps:
        """Send ``row``; return the complete steps. An error is raised on all processes."""
        answer = self._hold(row, is_survey=True)
        if isinstance(answer, CompleteSteps):
            return answer
        text = answer.error if isinstance(answer, Failed) else "it did not answer"
        failure = RestoreFailed("survey", "the job", text)
        raise self._leader_error or self._with_own_leaves(failure)

    def _hold(self, row: Row, *, is_survey: bool) -> Answer:
        name = f"{self._name}/{self._held}"
        answer_round = Round(
            self._coordinator,
            name,
            deadline_left_s(self._deadline_s),
            absent=self._absent,
            prompt=True,
            grouped=True,
            series=self._series,
        )

        def answer_all(said: Mapping[int, bytes]) -> Callable[[Collection[int]], bytes]:
            answer = self._answer(said, is_survey=is_survey)
            common = answer.common() if isinstance(answer, RestorePlan) else None
            if common is not None:
                answer_round.tell_apart(_COMMON, msgspec.json.encode(common))
            if isinstance(answer, RestorePlan | LoadPlan):
                return lambda processes: msgspec.json.encode(answer.share_of(processes))
            encoded = msgspec.json.encode(answer)
            return lambda _: encoded

        data = answer_round.hold(msgspec.json.encode(row), answer_round.when_all(answer_all))
        self._held += 1
        what = f"{name}, the answer of process 0"
        answer = decode_message(data, Answer, what, limit_bytes=MAX_PLAN_MESSAGE_BYTES)
        if isinstance(answer, RestorePlan) and answer.has_common:
            common = answer_round.learn_apart(_COMMON)
            return answer.with_common(
                decode_message(common, CommonPart, what, limit_bytes=MAX_PLAN_MESSAGE_BYTES)
            )
        return answer

    def _absent(self, processes: Collection[int]) -> Mapping[int, str]:
        gone = have_left(self._coordinator, processes)
        if not gone:
            self._check(processes)
        return gone

    def _answer(self, said: Mapping[int, bytes], *, is_survey: bool) -> Answer:
        """At the leader: return the answer to the rows of all processes."""
        assert self._leader is not None, "process 0 has the leader"
        try:
            rows: dict[int, Row] = {
                process: decode_message(
                    data, Row, f"row of process {process}", limit_bytes=MAX_PLAN_MESSAGE_BYTES
                )
                for process, data in said.items()
            }
            self._check_steps(rows)
            self._check_states(rows)
            return self._leader.survey(rows) if is_survey else self._leader.answer(rows)
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            failure = error
            if not isinstance(failure, CheckpointError):
                problem = f"unexpected {type(error).__name__} at the leader: {error!s:.300}"
                failure = RestoreFailed("restore", "the job", problem)
                failure.__cause__ = error
            self._leader_error = failure
            text = valid_text(str(failure), _LEADER_LIMIT_CHARS) or type(error).__name__
            return Failed(text, _failure_kind(failure))

    def _check_steps(self, rows: Mapping[int, Row]) -> None:
        """At the leader: RestoreFailed when a process asks for another step than the leader."""
        asked = {p: row.report.step for p, row in sorted(rows.items()) if row.report}
        for process, step in asked.items():
            if step != self._step:
                first = _asked(self._step)
                raise RestoreFailed(
                    "restore",
                    "the job",
                    f"process {process} asks for {_asked(step)}, process 0 for {first}",
                    hint="ask for one step on all processes, or for none: latest_step may differ",
                )

    def _check_states(self, rows: Mapping[int, Row]) -> None:
        """At the leader: RestoreFailed when a process asks for another state than the leader.

        The leader has only the digests of states, which may have many leaves. So it publishes its
        own leaves, and the other process names the differences.
        """
        # Not by the leader's row, which has no report where its own part of a load has failed.
        own = self._state_digest
        digests = {p: row.report.state_digest for p, row in sorted(rows.items()) if row.report}
        others = [process for process, digest in digests.items() if digest != own]
        if not others:
            return
        if len(self._specs) <= MAX_PLAN_MESSAGE_BYTES:
            self._series.add(f"{self._name}/leaves")
            self._coordinator.put(f"{self._name}/leaves", self._specs)
        who = f"{processes_text(others, _MOST_NAMED)} ask{'s' * (len(others) == 1)}"
        raise RestoreFailed(
            "restore",
            "the state",
            f"{who} for other leaves, shapes or dtypes than process 0",
            hint="the error of each of them names the leaves",
        )

    def _with_own_leaves(self, error: CheckpointError) -> CheckpointError:
        """Return the leader's error, with the leaves in which this process differs from it."""
        data = None
        with contextlib.suppress(CheckpointError):
            data = self._coordinator.find(f"{self._name}/leaves")
        if data is None:
            return error
        leaves: list[LeafSpec] = decode_message(
            data, list[LeafSpec], f"{self._name}/leaves", limit_bytes=MAX_PLAN_MESSAGE_BYTES
        )
        lines = compare_targets(self._leaves, {leaf.path: leaf for leaf in leaves})
        if not lines:
            return error
        more = [f"and {len(lines) - _MOST_NAMED} more"] if len(lines) > _MOST_NAMED else []
        text = "; ".join([*lines[:_MOST_NAMED], *more])
        return RestoreFailed("restore", "the state", f"it is not that of process 0: {text}")


def _asked(step: int | None) -> str:
    return "the newest complete step" if step is None else f"step {step}"
