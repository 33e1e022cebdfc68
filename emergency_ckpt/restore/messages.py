"""The dialogue of the processes of one restore: reports, plans, outcomes. No tensors."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from emergency_ckpt.cluster.collectives import await_leader, gather, share
from emergency_ckpt.cluster.coordination import Coordinator, deadline_left_s, forget
from emergency_ckpt.cluster.messages import decode_message
from emergency_ckpt.core.limits import MAX_PLAN_MESSAGE_BYTES
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.restore.leaves.leaf_comparison import compare_targets
from emergency_ckpt.core.restore.plan_types import RestorePlan
from emergency_ckpt.core.restore.prefetch import PrefetchReport, decide_prefetch
from emergency_ckpt.errors import CheckpointError, RestoreFailed
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.leader import RestoreLeader
from emergency_ckpt.restore.protocol import (
    Answer,
    LoadPlan,
    PlanFailed,
    Report,
    Status,
    SurveyAnswer,
    UsePrefetched,
    Verdict,
    WholeSteps,
    failure_kind,
    failure_of,
)
from emergency_ckpt.state.tree import StateTree
from emergency_ckpt.types import LeafSpec

_NO_PREFETCH = PrefetchReport()
_MOST_NAMED = 8


class RestoreDialogue:
    """One process's side of one restore; all methods are collective and block.

    Args:
      name: of this restore, the same everywhere.
      names: at the leader, of the restores whose keys the coordination service still has.
      new_leader: called once, in process 0, when all have reported.
      deadline_s: of ``time.monotonic``; DeadlineExceeded after it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        name: str,
        names: deque[str],
        new_leader: Callable[[], RestoreLeader],
        events: EventSink,
        *,
        deadline_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._names = names
        self._new_leader = new_leader
        self._events = events
        self._deadline_s = deadline_s
        self._leader: RestoreLeader | None = None
        self._leader_error: CheckpointError | None = None
        self._uses_prefetched = False
        self._reports = 0
        self._wanted: Mapping[str, LeafSpec] = {}
        self._gathered = ""  # the newest reports, on which the leader decides
        if coordinator.process_index == 0:
            names.append(name)

    def _left_s(self) -> float:
        return deadline_left_s(self._deadline_s)

    def report(
        self,
        inventory: HolderInventory,
        tree: StateTree,
        *,
        wants_host_state: bool,
        prefetch: PrefetchReport = _NO_PREFETCH,
    ) -> None:
        """Tell the leader what this process holds and wants, and whether it is there already."""
        self._wanted = tree.wanted
        specs = msgspec.json.encode(list(self._wanted.values()))
        report = Report(
            inventory=inventory,
            state_digest=hashlib.sha256(specs).hexdigest(),
            wants_host_state=wants_host_state,
            prefetch=prefetch,
        )
        self._gathered, self._reports = f"{self._name}/report/{self._reports}", self._reports + 1
        reports = gather(
            self._coordinator, self._gathered, msgspec.json.encode(report), self._left_s()
        )
        if self._coordinator.process_index != 0:
            return
        # All have come, so all have left the restores before this one.
        while self._name in self._names and self._names[0] != self._name:
            forget(self._coordinator, self._names.popleft())
        if self._leader is None:
            self._leader = self._new_leader()
        try:
            decoded: dict[int, Report] = {
                p: decode_message(data, Report, f"report of process {p}")
                for p, data in reports.items()
            }
            known = (each.inventory.greatest for each in decoded.values())
            self._leader.greatest = max(self._leader.greatest, *known)
            self._check_states(decoded, report.state_digest, specs)
            if not self._may_use_prefetched({p: r.prefetch for p, r in decoded.items()}):
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
            self._coordinator.put(f"{self._name}/leaves", specs)
        named = ", ".join(map(str, others[:_MOST_NAMED])) + (", ..." * (len(others) > _MOST_NAMED))
        one = "process {} asks" if len(others) == 1 else "processes {} ask"
        raise RestoreFailed(
            "restore",
            "the state",
            f"{one.format(named)} for other leaves, shapes or dtypes than process 0",
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

    def learn_steps(self) -> WholeSteps:
        """Return the whole steps, instead of a plan. The same error everywhere when that fails."""
        answer = None
        if self._leader is not None:
            try:
                if self._leader_error is not None:
                    raise self._leader_error
                answer = SurveyAnswer(self._leader.whole_steps())
            except Exception as error:  # noqa: BLE001 - the others wait for an answer
                self._leader_error = typed = _typed(error)
                answer = SurveyAnswer(error=str(typed)[:4000] or type(error).__name__)
        data = None if answer is None else msgspec.json.encode(answer)
        name = f"{self._name}/steps"
        shared = share(self._coordinator, name, data, self._left_s(), self._gathered)
        found: SurveyAnswer = decode_message(shared, SurveyAnswer, name)
        if found.error:
            raise self._leader_error or self._told(RestoreFailed("survey", "the job", found.error))
        return found.steps

    def _may_use_prefetched(self, reports: Mapping[int, PrefetchReport]) -> bool:
        decision = decide_prefetch(reports)
        if decision.kind == "fail":
            raise RestoreFailed("prefetch", "the state", decision.reason, hint="restore again")
        if decision.kind == "restore" and decision.reason:
            self._events.emit("prefetch.unused", reason=decision.reason)
        self._uses_prefetched = decision.kind == "use"
        return self._uses_prefetched

    def learn_plan(self, attempt: int) -> Answer:
        """The leader plans and tells each process its part."""
        name, coordinator = f"{self._name}/{attempt}/plan", self._coordinator
        me = coordinator.process_index
        if self._leader is None:
            data = await_leader(coordinator, f"{name}/{me}", self._left_s(), self._gathered)
            return decode_message(data, Answer, name)
        try:
            if self._leader_error is not None:
                raise self._leader_error
            answer: Answer = UsePrefetched() if self._uses_prefetched else self._leader.plan()
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            self._leader_error = typed = _typed(error)
            answer = PlanFailed(str(typed)[:4000], failure_kind(typed))
        for process in range(coordinator.process_count):
            coordinator.put(f"{name}/{process}", msgspec.json.encode(_share(answer, process)))
        return _share(answer, me)

    def agree(self, attempt: int, status: Status) -> Verdict:
        """Collect how an attempt went; the leader's verdict is everyone's."""
        name = f"{self._name}/{attempt}"
        statuses = gather(
            self._coordinator, f"{name}/status", msgspec.json.encode(status), self._left_s()
        )
        verdict = None
        if self._leader is not None:
            verdict = msgspec.json.encode(self._decide(self._leader, statuses))
        told = f"{name}/verdict"
        data = share(self._coordinator, told, verdict, self._left_s(), f"{name}/status")
        return decode_message(data, Verdict, told)

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

    def failure(self, answer: PlanFailed) -> CheckpointError:
        """Return the error that left no plan: at the leader as raised, where it is a fault."""
        if self._leader_error is not None and answer.kind in ("failed", "given_up"):
            return self._leader_error
        failure = failure_of(answer.kind, "the job", answer.error)
        failure.__cause__ = self._leader_error
        return self._told(failure) if answer.kind == "failed" else failure


def _typed(error: Exception) -> CheckpointError:
    """Return the error to tell all processes; an unexpected one ends the restore on each."""
    if isinstance(error, CheckpointError):
        return error
    failure = RestoreFailed(
        "restore", "the job", f"unexpected {type(error).__name__} at the leader: {error!s:.300}"
    )
    failure.__cause__ = error
    return failure


def _share(answer: Answer, process: int) -> Answer:
    """Return the part of ``answer`` that is sent to a process."""
    return answer.share_of(process) if isinstance(answer, RestorePlan | LoadPlan) else answer
