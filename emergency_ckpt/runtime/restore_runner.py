"""A restore, on every process at once: report, plan, carry out, agree. One outcome for all."""

from __future__ import annotations

import dataclasses
import time
from collections import deque

from emergency_ckpt.core.plan_types import NoPlan, ProcessPlan, Rejection, RestorePlan
from emergency_ckpt.errors import (
    CorruptData,
    PersistentTierError,
    RestoreFailed,
    TransferError,
)
from emergency_ckpt.runtime.coordination import (
    Coordinator,
)
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.holdings import ProcessHoldings, holder_name
from emergency_ckpt.runtime.peers import Peers
from emergency_ckpt.runtime.restore_dialogue import RestoreDialogue
from emergency_ckpt.runtime.restore_host_state import HostStateRemap, fetch_documents, put_back
from emergency_ckpt.runtime.restore_leader import RestoreLeader, Wanted, persistent_unusable
from emergency_ckpt.runtime.restore_types import (
    LoadPart,
    LoadPlan,
    PlanFailed,
    RestoreReport,
    Status,
    Tally,
    no_plan_error,
)
from emergency_ckpt.runtime.shard_collection import CopiesFailed, ShardCollection
from emergency_ckpt.runtime.storage_load import NotAsSaved, StorageLoad, checked
from emergency_ckpt.tiers import host_state as host_states
from emergency_ckpt.tiers.local import LocalTier
from emergency_ckpt.tiers.materialize import materialize
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.tiers.state_tree import BoxTable, PyTree, StateTree
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import SaveId


@dataclasses.dataclass(frozen=True)
class RestoreParts:
    """What every restore of one checkpointer works with.

    Attributes:
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
    host_state_limit_bytes: int
    timeout_s: float
    names: deque[str] = dataclasses.field(default_factory=deque[str])


@dataclasses.dataclass(frozen=True)
class Restored:
    """The outcome of a restore that found something.

    Attributes:
      save: identity of the restored save, which lies in RAM now, wherever it came from.
      incarnation: the id under which the job saves from now on.
    """

    state: PyTree
    report: RestoreReport
    save: SaveId
    incarnation: str


@dataclasses.dataclass(frozen=True)
class _Brought:
    """What one attempt brought back on this process."""

    state: PyTree
    host_state: object
    tally: Tally


class Restore:
    """One restore; ``run`` is collective and is called once. ``number`` is the same everywhere."""

    def __init__(
        self,
        parts: RestoreParts,
        tree: StateTree,
        like: PyTree,
        *,
        requested_step: int | None,
        host_state: object,
        buddies: tuple[int, ...],
        number: int,
        keep_newer: bool = False,
    ) -> None:
        self._parts = parts
        self._keep_newer = keep_newer
        self._buddies = buddies
        self._tree = tree
        self._like = like
        self._requested_step = requested_step
        self._host_state = host_state
        self._deadline_s = time.monotonic() + parts.timeout_s
        self._dialogue = RestoreDialogue(
            parts.coordinator,
            f"restore/{number}",
            parts.names,
            self._new_leader,
            deadline_s=self._deadline_s,
        )
        self._before: host_states.Payload = None
        self._moved = False  # the host state: from where it was before
        self._loaded: LoadPlan | None = None
        self._loaded_bytes = 0

    @property
    def _process(self) -> tuple[int, int]:
        return self._parts.coordinator.process_index, self._parts.coordinator.process_count

    def run(self) -> Restored | None:
        """Bring back the newest whole step; None when there never was one.

        Raises the same kind of error on every process, and then leaves the host state as it was.
        """
        self._before = host_states.capture(self._host_state)
        try:
            return self._run()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the host state back to where it was before ``run``."""
        if self._moved:
            host_states.apply(self._host_state, self._before)
            self._moved = False

    def _run(self) -> Restored | None:
        started_s = time.monotonic()
        self._parts.events.emit("restore.started", requested_step=self._requested_step)
        self._report()
        attempt = 0
        while True:
            answer = self._dialogue.learn_plan(attempt)
            if isinstance(answer, NoPlan | PlanFailed):
                return self._without_plan(answer)
            brought, status = self._attempt(answer)
            verdict = self._dialogue.agree(attempt, status)
            if verdict.done and brought is not None:
                break
            del brought
            self.undo()
            if verdict.error:
                hint = "no process has restored anything"
                raise RestoreFailed("restore", f"step {answer.step}", verdict.error, hint=hint)
            if verdict.loaded:
                assert isinstance(answer, LoadPlan)
                self._loaded = answer
                self._report()
            attempt += 1
        assert isinstance(answer, RestorePlan)
        assert answer.save is not None, "a persistent step is loaded into RAM first"
        self._forget_newer(answer.save)
        report = self._finished(answer, brought, time.monotonic() - started_s)
        return Restored(brought.state, report, answer.save, verdict.incarnation)

    def _report(self) -> None:
        self._dialogue.report(
            self._parts.holdings.inventory(),
            self._tree,
            wants_host_state=self._host_state is not None,
        )

    def _new_leader(self) -> RestoreLeader:
        parts = self._parts
        wanted = Wanted(
            targets=BoxTable(self._tree, self._process[1]).targets(),
            leaves=self._tree.specs,
            requested_step=self._requested_step,
            run_id=parts.run_id,
            remap=parts.remap is not None,
            allow_missing_host_state=parts.allow_missing_host_state,
            extra_holders=parts.extra_holders,
            deadline_s=self._deadline_s,
        )
        return RestoreLeader(parts.tier, parts.client, parts.persistent, parts.events, wanted)

    def _attempt(self, plan: RestorePlan | LoadPlan) -> tuple[_Brought | None, Status]:
        """Carry out this process's part. What fails is told to all, never raised alone."""
        tier = "persistent" if isinstance(plan, LoadPlan) else "local"
        if self._loaded is None or plan.step != self._loaded.step:
            self._tell(plan.step, tier, plan.rejected)
        # A step from storage is passed over as a whole; copies in RAM one by one.
        unusable = (persistent_unusable(plan.step),)
        try:
            if isinstance(plan, LoadPlan):
                self._load(plan)
                return None, Status()
            assert plan.save is not None
            return self._from_local(plan, plan.save), Status()
        except CopiesFailed as error:
            return None, Status(str(error), error.unusable)
        except (PersistentTierError, NotAsSaved) as error:
            return None, Status(str(error)[:2000], unusable)
        except CorruptData as error:
            return None, Status(str(error)[:2000], unusable if tier == "persistent" else ())
        except Exception as error:  # noqa: BLE001 - becomes the collective error of all processes
            return None, Status(f"{type(error).__name__}: {error}"[:2000])

    def _tell(self, step: int, tier: str, rejected: tuple[Rejection, ...]) -> None:
        events = self._parts.events
        events.emit("restore.planned", step=step, tier=tier, rejected=len(rejected))
        for each in rejected:
            events.emit("restore.rejected", step=each.step, tier=each.tier, reason=each.reason)

    def _load(self, plan: LoadPlan) -> None:
        """Bring this process's part of a persistent step into RAM.

        In half of the time that is left: an older step may have to be tried.
        """
        parts, now_s = self._parts, time.monotonic()
        assert parts.persistent is not None, "only a checkpointer with a directory plans for it"
        load = StorageLoad(
            parts.tier,
            parts.persistent,
            plan,
            me=self._process[0],
            leaves=[leaf.spec for leaf in self._tree.leaves],
            host_state_limit_bytes=parts.host_state_limit_bytes,
            deadline_s=now_s + (self._deadline_s - now_s) / 2,
        )
        self._loaded_bytes += load.run()
        parts.events.emit(
            "restore.loaded",
            step=plan.step,
            bytes_persistent=self._loaded_bytes,
            seconds=time.monotonic() - now_s,
        )

    def _from_local(self, plan: RestorePlan, save: SaveId) -> _Brought:
        parts, (me, _) = self._parts, self._process
        part = plan.processes.get(me, ProcessPlan())
        parts.tier.protect(held.save for held in parts.tier.held()[0])
        shards = ShardCollection(
            parts.tier,
            parts.client,
            parts.events,
            save=save,
            me=holder_name(me),
            deadline_s=self._deadline_s,
        )
        shards.collect(part)
        parts.events.emit(
            "restore.fetched",
            step=plan.step,
            bytes_local=shards.tally.local,
            bytes_peer=shards.tally.peer,
        )
        documents = fetch_documents(
            parts.tier, parts.client, part, save, plan.host_state_count or 0, holder_name(me)
        )
        bytes_of = shards.bytes_of
        if self._loaded is not None and self._loaded.save == save:
            # What was just read for oneself is no find in one's own RAM.
            shards.tally.local = max(0, shards.tally.local - self._loaded_bytes)
            shards.tally.persistent = self._loaded_bytes
            bytes_of = checked(bytes_of, self._loaded.parts.get(me, LoadPart()))
        state = materialize(self._tree, self._like, bytes_of)
        host_state = self._put_back(documents)
        return _Brought(state, host_state, shards.tally)

    def _put_back(self, documents: list[host_states.HostStateDocument]) -> object:
        if self._host_state is None:
            return None
        self._moved = True
        return put_back(self._host_state, documents, self._parts.remap, self._process)

    def _forget_newer(self, kept: SaveId) -> None:
        """No leftover of another life may ever look newer than what training goes on from."""
        if not self._keep_newer:
            self._parts.tier.invalidate_newer(kept)
        self._parts.tier.note_complete(kept)
        self._push_host_state(kept)
        self._dialogue.wait_for_all()

    def _push_host_state(self, save: SaveId) -> None:
        """A buddy that lost its RAM keeps a copy again, as after a save."""
        parts, (me, count) = self._parts, self._process
        data = parts.tier.host_state_bytes(save, me, count)
        for buddy in self._buddies if data is not None else ():
            try:
                parts.peers.push_host_state(buddy, save, data or b"")
            except TransferError as error:
                # The restore itself is whole; until the next save there is one copy less.
                parts.events.emit("restore.push_failed", buddy=buddy, reason=str(error))

    def _finished(self, plan: RestorePlan, brought: _Brought, seconds: float) -> RestoreReport:
        tally = brought.tally
        report = RestoreReport(
            step=plan.step,
            tier="local"
            if self._loaded is None or self._loaded.save != plan.save
            else "persistent",
            seconds=seconds,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
            bytes_persistent=tally.persistent,
            host_state=brought.host_state,
            rejected=plan.rejected,
        )
        self._parts.events.emit(
            "restore.finished",
            step=report.step,
            tier=report.tier,
            seconds=report.seconds,
            bytes_local=report.bytes_local,
            bytes_peer=report.bytes_peer,
            bytes_persistent=report.bytes_persistent,
        )
        return report

    def _without_plan(self, answer: NoPlan | PlanFailed) -> None:
        if isinstance(answer, PlanFailed):
            raise self._dialogue.failure(answer)
        for note in answer.notes:
            self._parts.events.emit("restore.note", text=note)
        if answer.kind != "nothing":
            raise no_plan_error(answer, f"run {self._parts.run_id!r}")
        # Leftovers of saves that never became whole must not mix with what comes.
        self._parts.tier.invalidate_newer(SaveId(-1, "", self._parts.run_id))
        self._dialogue.wait_for_all()
        self._parts.events.emit("restore.nothing")
