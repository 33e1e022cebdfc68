"""The dialogue of the processes of one restore: reports, plans, outcomes. No tensors.

1. ``report``: each process says what its RAM holds and what it wants; the leader hears all.
2. ``learn_plan``, or in a survey ``learn_steps``: the leader plans, and tells each its part.
3. ``agree``: each says how its part went; the leader's verdict is everyone's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from emergency_ckpt.cluster.coordination import Coordinator, deadline_left_s, decode_message
from emergency_ckpt.cluster.left_processes import have_left
from emergency_ckpt.cluster.round import Round, Series
from emergency_ckpt.core.limits import MAX_PLAN_MESSAGE_BYTES
from emergency_ckpt.core.restore.inventory import HolderInventory, Quarantined, RestoredSave
from emergency_ckpt.core.restore.leaves import compare_targets
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan
from emergency_ckpt.core.wording import processes_text
from emergency_ckpt.errors import (
    CheckpointError,
    HolderUnreachable,
    PersistentTierError,
    RamdiskFull,
    RestoreFailed,
    StorageUnreachable,
)
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.restore.storage_load import LoadPlan
from emergency_ckpt.state.tree import StateTree
from emergency_ckpt.types import LeafSpec

if TYPE_CHECKING:
    from emergency_ckpt.restore.leader import RestoreLeader

_MOST_NAMED = 8


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process's inventory, and a digest of the state that it wants back.

    Attributes:
      damaged: by digest, shards of its own copies that it found damaged before.
      restored: the saves that the newest lives began from, by its records.
    """

    inventory: HolderInventory
    state_digest: str
    wants_host_state: bool
    damaged: dict[str, tuple[int, ...]] = {}
    restored: tuple[RestoredSave, ...] = ()


FailureKind = Literal["failed", "holder", "storage", "no_room"]
"""Cause that ends a restore: a fault; a holder of copies in RAM, or storage, could not be reached.
The last one ends none: the process that found no room in its ramdisk uses memory from then on, and
all try again."""


class Status(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outcome of one process's part of a plan.

    ``unusable`` names copies that failed; with them the leader plans anew, as it does when the
    ``kind`` is "no_room". Any other ``error`` with nothing unusable ends the restore on all
    processes.
    """

    error: str = ""
    unusable: tuple[Quarantined, ...] = ()
    kind: FailureKind = "failed"


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The leader's decision on all statuses: done, once more, or the end.

    ``done``: of a ``LoadPlan`` too; the step lies in RAM then. ``kind``: of the ``error``, where
    all processes that ended it agree on one, else ``failed``. ``incarnation``: the id under which
    the job saves from now on, where the restore is done.
    """

    done: bool = False
    error: str = ""
    kind: FailureKind = "failed"
    incarnation: str = ""


class PlanFailed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The leader could not plan at all, or tell the steps; nobody restores."""

    error: str
    kind: FailureKind = "failed"


def failure_kind(error: Exception) -> FailureKind:
    """Return what ``error`` means for all processes of the restore."""
    match error:
        case HolderUnreachable():
            return "holder"
        case PersistentTierError(unreachable=True, retryable=True):
            return "storage"
        case RamdiskFull():
            return "no_room"
        case _:
            return "failed"


def failure_of(kind: FailureKind, target: str, problem: str) -> RestoreFailed:
    """Return the error that every process raises."""
    match kind:
        case "holder":
            hint = f"{_UNREACHABLE_HINT}. {_SILENCE_HINT}"
            return HolderUnreachable("restore", target, problem, hint=hint)
        case "storage":
            return StorageUnreachable("restore", target, problem, hint=_UNREACHABLE_HINT)
        case "failed" | "no_room":
            hint = "no process has restored anything"
            return RestoreFailed("restore", target, problem, hint=hint)


_UNREACHABLE_HINT = (
    "no process has restored anything; restore again: what cannot be reached is not lost."
    " An older step is taken only when it is asked for by its number"
)
_SILENCE_HINT = (
    "A peer may be silent for transfer_timeout_s, nothing may move for stall_timeout_s, and JAX"
    " aborts the job after heartbeat_timeout_seconds (of jax.distributed.initialize)"
)


Answer = RestorePlan | NoPlan | PlanFailed | LoadPlan | CompleteSteps


class RestoreDialogue:
    """One process's side of one restore; all methods are collective and block.

    Args:
      name: of this restore, the same everywhere.
      series: of the restores, whose rounds these are.
      new_leader: called once, in process 0, when all have reported.
      deadline_s: of ``time.monotonic``; DeadlineExceeded after it.
      check: called at intervals of some seconds with the processes that this one waits for; what it
        raises ends the wait.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        series: Series,
        new_leader: Callable[[], RestoreLeader],
        *,
        deadline_s: float,
        check: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._series = series
        self._new_leader = new_leader
        self._deadline_s = deadline_s
        self._check = check
        self._leader: RestoreLeader | None = None
        self._leader_error: CheckpointError | None = None
        self._reports = 0
        self._wanted: Mapping[str, LeafSpec] = {}
        self._answers = 0

    def _round(self, name: str, *, for_each: bool = False) -> Round:
        def absent(processes: Collection[int]) -> Mapping[int, str]:
            found = have_left(self._coordinator, processes)
            if not found:
                self._check(processes)
            return found

        return Round(
            self._coordinator,
            f"{self._name}/{name}",
            deadline_left_s(self._deadline_s),
            absent=absent,
            prompt=True,
            for_each=for_each,
            series=self._series,
        )

    def _next_answer(self) -> Round:
        """Return the round of the leader's next plan or list of steps, in which nothing is said."""
        name, self._answers = f"answer/{self._answers}", self._answers + 1
        return self._round(name, for_each=True)

    def report(
        self,
        inventory: HolderInventory,
        tree: StateTree,
        *,
        wants_host_state: bool,
        damaged: dict[str, tuple[int, ...]] | None = None,
        restored: tuple[RestoredSave, ...] = (),
    ) -> None:
        """Tell the leader what this process holds and wants."""
        self._wanted = tree.wanted
        specs = msgspec.json.encode(list(self._wanted.values()))
        report = Report(
            inventory=inventory,
            state_digest=hashlib.sha256(specs).hexdigest(),
            wants_host_state=wants_host_state,
            damaged=damaged or {},
            restored=restored,
        )
        held = self._round(f"report/{self._reports}")
        self._reports += 1
        held.say(msgspec.json.encode(report))
        if self._coordinator.process_index != 0:
            return
        try:
            held.hear(held.when_all(lambda _: b""))
            if self._leader is None:
                self._leader = self._new_leader()
        except Exception as error:
            self._next_answer().fail(error)  # the others wait for it
            raise
        try:
            decoded: dict[int, Report] = {
                p: decode_message(data, Report, f"report of process {p}")
                for p, data in held.heard.items()
            }
            self._check_states(decoded, report.state_digest, specs)
            self._leader.take_reports(decoded)
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            self._leader_error = _typed(error)

    def _check_states(self, reports: Mapping[int, Report], digest: str, specs: bytes) -> None:
        """At the leader: RestoreFailed when processes ask for other states than this one.

        They compare theirs with it: the leader has the digests alone, and leaves may be many.
        """
        others = [p for p, report in sorted(reports.items()) if report.state_digest != digest]
        if not others:
            return
        if len(specs) <= MAX_PLAN_MESSAGE_BYTES:
            self._series.add(f"{self._name}/leaves")
            self._coordinator.put(f"{self._name}/leaves", specs)
        who = f"{processes_text(others, _MOST_NAMED)} ask{'s' * (len(others) == 1)}"
        raise RestoreFailed(
            "restore",
            "the state",
            f"{who} for other leaves, shapes or dtypes than process 0",
            hint="the error of each of them names the leaves",
        )

    def _told(self, error: CheckpointError) -> CheckpointError:
        """Return the leader's error, with the leaves in which this process differs from it."""
        data = None
        with contextlib.suppress(CheckpointError):
            data = self._coordinator.find(f"{self._name}/leaves")
        if data is None:
            return error
        leaves: list[LeafSpec] = decode_message(data, list[LeafSpec], f"{self._name}/leaves")
        lines = compare_targets(self._wanted, {leaf.path: leaf for leaf in leaves})
        if not lines:
            return error
        more = [f"and {len(lines) - _MOST_NAMED} more"] if len(lines) > _MOST_NAMED else []
        text = "; ".join([*lines[:_MOST_NAMED], *more])
        return RestoreFailed("restore", "the state", f"it is not that of process 0: {text}")

    def learn_steps(self) -> CompleteSteps:
        """Return the complete steps, instead of a plan. Raises on all; at the leader as raised."""
        told = self._learn(lambda leader: leader.complete_steps())
        if isinstance(told, PlanFailed):
            raise self._leader_error or self._told(RestoreFailed("survey", "the job", told.error))
        return told

    def learn_plan(self) -> RestorePlan | LoadPlan | NoPlan:
        """The leader plans and tells each process its part.

        Raises the error that left no plan, on all: at the leader as raised, where it is a fault.
        """
        told = self._learn(lambda leader: leader.plan())
        if not isinstance(told, PlanFailed):
            return told
        if self._leader_error is not None and told.kind == "failed":
            raise self._leader_error
        failure = failure_of(told.kind, "the job", told.error)
        raise (self._told(failure) if told.kind == "failed" else failure) from self._leader_error

    def _learn(self, ask: Callable[[RestoreLeader], Answer]) -> Any:
        """Return this process's part of the leader's answer, or PlanFailed."""
        if self._leader is None:
            data = self._next_answer().learn()
            return decode_message(data, Answer, f"{self._name}, an answer of process 0")
        try:
            if self._leader_error is not None:
                raise self._leader_error
            answer = ask(self._leader)
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            self._leader_error = typed = _typed(error)
            answer = PlanFailed(str(typed)[:4000] or type(error).__name__, failure_kind(typed))
        held = self._next_answer()
        everyone, encode = range(self._coordinator.process_count), msgspec.json.encode
        try:
            held.tell({process: encode(_share(answer, process)) for process in everyone})
        except Exception as error:
            held.fail(error)
            raise
        return _share(answer, self._coordinator.process_index)

    def agree(self, attempt: int, status: Status) -> Verdict:
        """Collect how an attempt went; the leader's verdict is everyone's."""
        held = self._round(f"{attempt}/status")

        def decide(statuses: Mapping[int, bytes]) -> bytes:
            assert self._leader is not None, "it has heard the reports"
            return msgspec.json.encode(self._decide(self._leader, statuses))

        data = held.hold(msgspec.json.encode(status), held.when_all(decide))
        return decode_message(data, Verdict, f"{self._name}/{attempt}/verdict")

    def _decide(self, leader: RestoreLeader, statuses: Mapping[int, bytes]) -> Verdict:
        try:
            return leader.decide(
                {
                    p: decode_message(d, Status, f"status of process {p}")
                    for p, d in statuses.items()
                }
            )
        except Exception as error:  # noqa: BLE001 - the others wait for a verdict
            self._leader_error = typed = _typed(error)
            return Verdict(error=str(typed)[:4000])


def _typed(error: Exception) -> CheckpointError:
    """Return the error to tell all processes; an unexpected one ends the restore on each."""
    if isinstance(error, CheckpointError):
        return error
    failure = RestoreFailed(
        "restore", "the job", f"unexpected {type(error).__name__} at the leader: {error!s:.300}"
    )
    failure.__cause__ = error
    return failure


def _share(answer: Any, process: int) -> Any:
    """Return the part of ``answer`` that is sent to a process."""
    return answer.share_of(process) if isinstance(answer, RestorePlan | LoadPlan) else answer
