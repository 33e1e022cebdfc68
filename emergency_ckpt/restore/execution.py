"""The larger half of a restore, on every process at once: report, plan, carry out, agree.

It ends when every process has the state on its devices. What changes the caller's objects, or what
the job saves next, is not here: this may run in the background while nobody trains.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections import deque
from typing import Protocol

from emergency_ckpt.cluster.coordination import ERROR_LIMIT_CHARS, Coordinator
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.shard_source import ProcessHoldings, holder_name
from emergency_ckpt.cluster.storage.claim import DirectoryClaim
from emergency_ckpt.cluster.storage.timeline import StorageTimeline
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.placement.retained_shards import RetainedShards
from emergency_ckpt.core.restore.majority import OnDivergence
from emergency_ckpt.core.restore.plan_types import NoPlan, ProcessPlan, Rejection, RestorePlan
from emergency_ckpt.core.restore.prefetch import PrefetchReport
from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.events import EventSink
from emergency_ckpt.restore.host_state import HostStateRemap, fetch_documents
from emergency_ckpt.restore.leader import RestoreLeader, Wanted
from emergency_ckpt.restore.messages import RestoreDialogue
from emergency_ckpt.restore.planning import persistent_unusable
from emergency_ckpt.restore.protocol import (
    LoadPlan,
    PlanFailed,
    Status,
    Tally,
    UsePrefetched,
    failure_kind,
    failure_of,
    passed_over,
)
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.restore.shards.outvoted_copies import quarantine_outvoted
from emergency_ckpt.restore.shards.shard_fetch import CopiesFailed
from emergency_ckpt.restore.shards.shard_loader import ShardCollection
from emergency_ckpt.restore.storage_load import StorageLoad
from emergency_ckpt.state.host_state import HostStateDocument
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.state.tree import BoxTable, PyTree, StateTree
from emergency_ckpt.tiers.local.tier import LocalTier
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import SaveId

_MARGIN_S = 10.0
"""So long before the deadline of a restore its calls to holders end."""


@dataclasses.dataclass(frozen=True)
class RestoreParts:
    """What every restore of one checkpointer works with.

    Attributes:
      storage_timeline: None in a job that does not save to storage.
      claim: on the persistent directory; None without one.
      names: at the leader, of the restores whose keys the coordination service still has.
    """

    coordinator: Coordinator
    tier: LocalTier
    holdings: ProcessHoldings
    client: TransferClient
    peers: Peers
    persistent: PersistentTier | None
    events: EventSink
    run_id: str
    remap: HostStateRemap | None
    extra_holders: tuple[str, ...]
    allow_missing_host_state: bool
    on_divergence: OnDivergence
    timeout_s: float
    timelines: Timelines
    storage_timeline: StorageTimeline | None
    claim: DirectoryClaim | None
    names: deque[str] = dataclasses.field(default_factory=deque[str])

    @property
    def process(self) -> tuple[int, int]:
        """(index of this process, number of processes)."""
        return self.coordinator.process_index, self.coordinator.process_count


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """What a restore is asked for on this process.

    Attributes:
      like: gives the types of host values.
      keeping: what stays in this process's RAM; None: all that it needs.
    """

    tree: StateTree
    like: PyTree
    requested_step: int | None
    wants_host_state: bool
    retained: RetainedShards | None


@dataclasses.dataclass(frozen=True)
class RestoredState:
    """What this process has of the restored step.

    Attributes:
      save: its identity; it lies in RAM now, wherever it came from.
      tier: ``local`` or ``persistent``: where it came from.
      documents: the host states that belong to this process, not yet applied.
      gathered: digest of the slot with all that this process keeps, where one was written.
      timeline: the newest that any process knew, or storage.
    """

    step: int
    save: SaveId
    tier: TierName
    state: PyTree
    documents: list[HostStateDocument]
    tally: Tally
    rejected: tuple[Rejection, ...]
    gathered: str | None = None
    timeline: Timeline | None = None


@dataclasses.dataclass(frozen=True)
class AgreedState:
    """Every process has its part. ``incarnation``: the id under which the job saves from now on."""

    restored_state: RestoredState
    incarnation: str


class Attempt(Protocol):
    """What belongs to an attempt besides bringing bytes."""

    def check(self) -> None:
        """Called between the parts of an attempt; what it raises ends the restore on all."""
        ...

    def apply_host_state(self, restored_state: RestoredState) -> None:
        """The state is here: apply what else there is. An error ends the restore on all."""
        ...

    def undo(self) -> None:
        """The attempt failed, here or elsewhere: as it was before ``apply_host_state``."""
        ...


class Prefetched(Protocol):
    """What this process has of a prefetch."""

    def take(self) -> RestoredState:
        """All processes have it: it is the caller's now."""
        ...

    def cancel(self, reason: str) -> None:
        """Some have not: let go of it, its memory is needed."""
        ...


class RestoreExecution:
    """One restore up to its verdict; ``run`` is collective and is called once.

    Args:
      name: the same everywhere, used once.
    """

    def __init__(self, parts: RestoreParts, request: RestoreRequest, name: str) -> None:
        self._parts = parts
        self._request = request
        self._deadline_s = time.monotonic() + parts.timeout_s
        self.dialogue = RestoreDialogue(
            parts.coordinator,
            name,
            parts.names,
            self._new_leader,
            parts.events,
            deadline_s=self._deadline_s,
        )
        # Ends first, so that all hear of who could not be reached, and not only of a deadline.
        margin_s = min(_MARGIN_S, parts.timeout_s / 10)
        self._calls = HolderCalls(parts.events, self._deadline_s - margin_s)
        self._loaded: LoadPlan | None = None
        self._loaded_bytes = 0

    @property
    def deadline_s(self) -> float:
        """Of ``time.monotonic``: when everything that waits here has given up."""
        return self._deadline_s

    def run(
        self,
        attempt: Attempt,
        word: PrefetchReport,
        prefetched: Prefetched | None = None,
    ) -> AgreedState | NoPlan | PlanFailed:
        """Bring the state, or say why there is no plan. Blocks until the deadline at most.

        RestoreFailed on all when it fails on one, AttemptGivenUp when it was only given up there.

        Args:
          word: what this process says of its prefetch.
          prefetched: where the word is that it is ready.
        """
        self._calls.check = attempt.check
        self._report(word)
        number = 0
        while True:
            answer = self.dialogue.learn_plan(number)
            if isinstance(answer, NoPlan | PlanFailed):
                return answer
            if prefetched is not None and not isinstance(answer, UsePrefetched):
                prefetched.cancel("not all processes have it")
            restored_state, status = self._attempt(answer, attempt, prefetched)
            verdict = self.dialogue.agree(number, status)
            if verdict.done and restored_state is not None:
                return AgreedState(restored_state, verdict.incarnation)
            del restored_state
            attempt.undo()
            if verdict.error:
                raise failure_of(verdict.kind, _target(answer), verdict.error)
            if verdict.loaded:
                assert isinstance(answer, LoadPlan)
                self._loaded = answer
                self._report(PrefetchReport())
            number += 1

    def _report(self, word: PrefetchReport) -> None:
        self.dialogue.report(
            self._parts.holdings.inventory(),
            self._request.tree,
            wants_host_state=self._request.wants_host_state,
            prefetch=word,
        )

    def _new_leader(self) -> RestoreLeader:
        parts, request = self._parts, self._request
        wanted = Wanted(
            targets=BoxTable(request.tree, parts.process[1]).targets(),
            leaves=request.tree.wanted,
            requested_step=request.requested_step,
            run_id=parts.run_id,
            remap=parts.remap is not None,
            allow_missing_host_state=parts.allow_missing_host_state,
            extra_holders=parts.extra_holders,
            on_divergence=parts.on_divergence,
            deadline_s=self._deadline_s,
        )
        return RestoreLeader(
            parts.tier, parts.client, parts.persistent, parts.events, wanted, self._calls
        )

    def _attempt(
        self,
        answer: RestorePlan | LoadPlan | UsePrefetched,
        attempt: Attempt,
        prefetched: Prefetched | None,
    ) -> tuple[RestoredState | None, Status]:
        """Carry out this process's part. What fails is told to all, never raised alone."""
        try:
            attempt.check()
            if isinstance(answer, LoadPlan):
                self._load(answer)
                return None, Status()
            if isinstance(answer, UsePrefetched):
                assert prefetched is not None, "this process said that it has it"
                restored_state = prefetched.take()
            else:
                restored_state = self._from_local(answer, attempt)
            attempt.apply_host_state(restored_state)
            return restored_state, Status()
        except Exception as error:  # noqa: BLE001 - becomes the collective error of all processes
            # Its frames hold what was placed already, and so memory that the next attempt needs.
            traceback.clear_frames(error.__traceback__)
            return None, _status_of(error, answer)

    def _tell(self, plan: RestorePlan | LoadPlan, tier: str) -> None:
        if self._loaded is not None and plan.step == self._loaded.step:
            return
        events = self._parts.events
        events.emit("restore.planned", step=plan.step, tier=tier, rejected=len(plan.rejected))
        for each in plan.rejected:
            events.emit("restore.rejected", step=each.step, tier=each.tier, reason=each.reason)

    def _load(self, plan: LoadPlan) -> None:
        """Bring this process's part of a persistent step into RAM.

        In half of the time that is left: an older step may have to be tried.
        """
        self._tell(plan, "persistent")
        parts, now_s = self._parts, time.monotonic()
        assert parts.persistent is not None, "only a checkpointer with a directory plans for it"
        load = StorageLoad(
            parts.tier,
            parts.persistent,
            plan,
            me=parts.process[0],
            leaves=[leaf.spec for leaf in self._request.tree.leaves],
            deadline_s=now_s + (self._deadline_s - now_s) / 2,
        )
        self._loaded_bytes += load.run()
        parts.events.emit(
            "restore.loaded",
            step=plan.step,
            bytes_persistent=self._loaded_bytes,
            seconds=time.monotonic() - now_s,
        )

    def _from_local(self, plan: RestorePlan, attempt: Attempt) -> RestoredState:
        assert plan.save is not None, "a persistent step is loaded into RAM first"
        self._tell(plan, "local")
        parts, save, me = self._parts, plan.save, self._parts.process[0]
        part = plan.processes.get(me, ProcessPlan())
        parts.tier.protect(held.save for held in parts.tier.held()[0])
        quarantine_outvoted(parts.tier, parts.events, save, holder_name(me), part.outvoted)
        shards = ShardCollection(
            parts.tier,
            parts.client,
            parts.events,
            save=save,
            me=holder_name(me),
            retained=self._request.retained,
            calls=self._calls,
            expendable=passed_over(plan, parts.run_id) - {save},
        )
        loaded = self._loaded is not None and self._loaded.save == save
        tier: TierName = "persistent" if loaded else "local"
        with shards.collecting(part) as arrivals:
            state = materialize(
                self._request.tree, self._request.like, shards.bytes_of, arrivals, shards.dtype_of
            )
        tally = shards.tally
        parts.events.emit(
            "restore.fetched",
            step=plan.step,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
        )
        attempt.check()
        documents = fetch_documents(
            parts.tier,
            parts.client,
            self._calls,
            part,
            save,
            plan.host_state_count or 0,
            holder_name(me),
        )
        if tier == "persistent":
            # What was just read for oneself is no find in one's own RAM.
            tally.local = max(0, tally.local - self._loaded_bytes)
            tally.persistent = self._loaded_bytes
        return RestoredState(
            plan.step,
            save,
            tier,
            state,
            documents,
            tally,
            plan.rejected,
            shards.gathered,
            plan.timeline,
        )


def _status_of(error: Exception, answer: RestorePlan | LoadPlan | UsePrefetched) -> Status:
    """Which copies are to blame, if any: a step from storage as a whole, those in RAM by one."""
    if isinstance(error, CopiesFailed):
        return Status(str(error), error.unusable)
    is_load = isinstance(answer, LoadPlan)
    lacks = isinstance(error, PersistentTierError) and not error.unreachable
    if lacks or (isinstance(error, CorruptData) and is_load):
        step = () if isinstance(answer, UsePrefetched) else (persistent_unusable(answer.step),)
        return Status(str(error)[:ERROR_LIMIT_CHARS], step)
    if isinstance(error, CorruptData):
        return Status(str(error)[:ERROR_LIMIT_CHARS])
    text = f"{type(error).__name__}: {error}"[:ERROR_LIMIT_CHARS]
    return Status(text, kind=failure_kind(error))


def _target(answer: RestorePlan | LoadPlan | UsePrefetched) -> str:
    return "what was prefetched" if isinstance(answer, UsePrefetched) else f"step {answer.step}"
