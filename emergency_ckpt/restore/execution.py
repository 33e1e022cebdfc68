"""The larger part of a restore, on every process at once: report, plan, carry out, agree.

A step in storage is restored in two phases: load it into RAM; report, and load it from RAM. The
restore ends when every process has the state on its devices. It does not change the caller's
objects or the saves to come, so it may run in the background while no process trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Protocol, TypeVar

from emergency_ckpt.cluster.coordination import ERROR_LIMIT_CHARS
from emergency_ckpt.cluster.shard_source import holder_name
from emergency_ckpt.core.boxes import describe
from emergency_ckpt.core.restore.plan_types import NoPlan, ProcessPlan, RestorePlan, few
from emergency_ckpt.errors import CorruptData, PersistentTierError
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.dialogue import RestoreDialogue
from emergency_ckpt.restore.leader import RestoreLeader
from emergency_ckpt.restore.planning import persistent_unusable
from emergency_ckpt.restore.protocol import (
    LoadPlan,
    PlanFailed,
    Status,
    Verdict,
    failure_kind,
    failure_of,
    passed_over,
)
from emergency_ckpt.restore.request import MadeOf, RestoredState, RestoreParts, RestoreRequest
from emergency_ckpt.restore.restored_host_state import fetch_documents
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.restore.shards.room import RestoreRoom
from emergency_ckpt.restore.shards.shard_fetch import CopiesFailed
from emergency_ckpt.restore.shards.shard_loader import ShardCollection
from emergency_ckpt.restore.storage.load import StorageLoad
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.state.tree import BoxTable
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, ShardId, TierName

_T = TypeVar("_T")

_OUTVOTED = "most holders have other bytes, and theirs are restored"

_PHASES = ("report", "plan", "load", "shards", "host_state", "agree")
_MARGIN_S = 10.0
"""Time between the end of its calls to holders and the deadline of a restore."""


@dataclasses.dataclass
class _Loaded:
    """The first phase of a restore from storage, so far.

    Attributes:
      save: the step that all processes have loaded into RAM.
      nbytes: read by this process, also of steps that failed on another.
    """

    save: SaveId | None = None
    nbytes: int = 0


class Attempt(Protocol):
    """The parts of an attempt besides loading bytes."""

    def check(self) -> None:
        """Raise what ends the restore on all. Called between the parts of an attempt."""
        ...

    def apply_host_state(self, restored: RestoredState) -> None:
        """Apply the host state, after the tensors. An error ends the restore on all."""
        ...

    def undo(self) -> None:
        """Undo ``apply_host_state``: the attempt failed, here or elsewhere."""
        ...


class Placed(Protocol):
    """This process's cache of one state that is on its devices already."""

    def find(self, wanted: MadeOf) -> RestoredState | None:
        """Return the state if it is made of ``wanted``; else release its memory, and None."""
        ...

    def release(self, reason: str) -> None:
        """Release the memory of the state, if there is one."""
        ...


class RestoreExecution:
    """One restore up to its verdict; ``run`` is collective and is called once.

    Args:
      name: the same everywhere, used once.
      placed: what this process has of it, or what will be asked for it later; None: neither.
    """

    def __init__(
        self, parts: RestoreParts, request: RestoreRequest, name: str, placed: Placed | None
    ) -> None:
        self._parts = parts
        self._request = request
        self._placed = placed
        self._deadline_s = time.monotonic() + parts.config.restore_timeout_s
        self._spent_s: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self.dialogue = RestoreDialogue(
            parts.coordinator,
            name,
            parts.series,
            self._new_leader,
            deadline_s=self._deadline_s,
        )
        # Ends first, so that all learn which holder was out of reach, and not only of a deadline.
        margin_s = min(_MARGIN_S, parts.config.restore_timeout_s / 10)
        self._calls = HolderCalls(parts.events, self._deadline_s - margin_s)
        self._room = RestoreRoom(parts.tier)

    @property
    def deadline_s(self) -> float:
        """Return the time, of ``time.monotonic``, at which every wait here has ended."""
        return self._deadline_s

    def run(self, attempt: Attempt) -> RestoredState | NoPlan | PlanFailed:
        """Restore the state, or return why there is no plan. Blocks until the deadline at most.

        A step in storage is restored in two phases: all processes load it into RAM and report
        again; then it is restored as any step in RAM.

        Raises:
          RestoreFailed: on all processes, when it fails on one; AttemptCancelled: it was cancelled
            there.
        """
        self._calls.check = self._room.check = self.dialogue.check = attempt.check
        try:
            return self._run(attempt)
        finally:
            spent = {f"{name}_seconds": seconds for name, seconds in self._spent_s.items()}
            self._parts.events.emit("restore.phases", **spent)

    def _run(self, attempt: Attempt) -> RestoredState | NoPlan | PlanFailed:
        self._report()
        loaded = _Loaded()
        number = -1
        while True:
            number += 1
            with self._phase("plan"):
                plan = self.dialogue.learn_plan()
            if isinstance(plan, NoPlan | PlanFailed):
                return plan
            if isinstance(plan, LoadPlan):
                if self._placed is not None:
                    self._placed.release(f"step {plan.step} is loaded from storage")
                if self._load_into_ram(number, plan, attempt, loaded):
                    self._report()
                continue
            restored = self._load_from_ram(number, plan, attempt, loaded)
            if restored is not None:
                return restored

    @contextlib.contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._spent_s[name] += time.monotonic() - started_s

    def _report(self) -> None:
        with self._phase("report"):
            self.dialogue.report(
                self._parts.holdings.inventory(),
                self._request.tree,
                wants_host_state=self._request.wants_host_state,
                damaged=self._parts.tier.damaged(),
            )

    def _new_leader(self) -> RestoreLeader:
        parts, request = self._parts, self._request
        targets = BoxTable(request.tree, parts.process[1]).targets()
        return RestoreLeader(parts, request, targets, self._calls, deadline_s=self._deadline_s)

    def _load_into_ram(
        self, number: int, plan: LoadPlan, attempt: Attempt, loaded: _Loaded
    ) -> bool:
        """Load a persistent step into the RAM of all processes; return whether all have it."""

        def load() -> int:
            attempt.check()
            self._emit_plan(plan, PERSISTENT, loaded)
            return self._load(plan, loaded)

        if self._on_all(number, plan, attempt, load) is None:
            return False
        loaded.save = plan.save
        return True

    def _load_from_ram(
        self, number: int, plan: RestorePlan, attempt: Attempt, loaded: _Loaded
    ) -> RestoredState | None:
        """Load a step in RAM onto the devices of all processes; None when it failed on one."""

        def restore() -> RestoredState:
            attempt.check()
            self._emit_plan(plan, LOCAL, loaded)
            restored = self._from_local(plan, attempt, loaded)
            with self._phase("host_state"):
                attempt.apply_host_state(restored)
            return restored

        done = self._on_all(number, plan, attempt, restore)
        if done is None:
            return None
        restored, verdict = done
        # Also what a prefetch is given: the restore after it begins a later life.
        self._parts.tier.note_incarnation(verdict.incarnation)
        return dataclasses.replace(restored, incarnation=verdict.incarnation)

    def _on_all(
        self,
        number: int,
        plan: RestorePlan | LoadPlan,
        attempt: Attempt,
        work: Callable[[], _T],
    ) -> tuple[_T, Verdict] | None:
        """Do ``work``, this process's part of ``plan``; return its result when all did theirs.

        Returns None where a copy failed: a new plan is due. Raises what ends the restore, on all.
        """
        result, status = _carry_out(work, plan)
        if status.kind == "no_room":
            self._room.note_full(status.error)
        with self._phase("agree"):
            verdict = self.dialogue.agree(number, status)
        if verdict.done and result is not None:
            return result, verdict
        del result
        attempt.undo()
        if verdict.error:
            raise failure_of(verdict.kind, f"step {plan.step}", verdict.error)
        return None

    def _emit_plan(self, plan: RestorePlan | LoadPlan, tier: str, loaded: _Loaded) -> None:
        if loaded.save is not None and plan.step == loaded.save.step:
            return
        events = self._parts.events
        events.emit("restore.planned", step=plan.step, tier=tier, rejected=len(plan.rejected))
        for each in plan.rejected:
            events.emit("restore.rejected", step=each.step, tier=each.tier, reason=each.reason)

    def _load(self, plan: LoadPlan, loaded: _Loaded) -> int:
        """Load this process's part of a persistent step into RAM; return its bytes.

        It takes at most half of the time that is left: an older step may have to be tried.
        """
        parts, now_s = self._parts, time.monotonic()
        assert parts.persistent is not None, "only a checkpointer with a directory plans for it"
        load = StorageLoad(
            parts.tier,
            parts.persistent,
            plan,
            me=parts.process[0],
            leaves=[leaf.spec for leaf in self._request.tree.leaves],
            deadline_s=now_s + (self._deadline_s - now_s) / 2,
            room=self._room,
        )
        with self._phase("load"):
            nbytes = load.run()
        loaded.nbytes += nbytes
        parts.events.emit(
            "restore.loaded",
            step=plan.step,
            bytes_persistent=loaded.nbytes,
            seconds=time.monotonic() - now_s,
        )
        return nbytes

    def _from_local(self, plan: RestorePlan, attempt: Attempt, loaded: _Loaded) -> RestoredState:
        assert plan.save is not None, "a persistent step is loaded into RAM first"
        parts, save, me = self._parts, plan.save, self._parts.process[0]
        part = plan.processes.get(me, ProcessPlan())
        parts.tier.protect([held.save for held in parts.tier.held()[0]])
        _quarantine_outvoted(parts.tier, parts.events, save, holder_name(me), part.outvoted)
        shards = ShardCollection(
            parts.tier,
            parts.client,
            parts.events,
            save=save,
            me=holder_name(me),
            retained=self._request.retained,
            calls=self._calls,
            room=self._room,
            expendable=passed_over(plan, parts.config.run_name) - {save},
        )
        with self._phase("shards"):
            restored = self._place(plan, part, save, shards, loaded)
        attempt.check()
        with self._phase("host_state"):
            documents = fetch_documents(
                parts.tier,
                parts.client,
                self._calls,
                self._room,
                part,
                save,
                plan.host_state_count or 0,
                holder_name(me),
            )
        return dataclasses.replace(
            restored,
            documents=documents,
            rejected=plan.rejected,
            timeline=plan.timeline,
            lack=restored.lack or self._room.lack,
            is_loaded=loaded.save == save,
        )

    def _place(
        self,
        plan: RestorePlan,
        part: ProcessPlan,
        save: SaveId,
        shards: ShardCollection,
        loaded: _Loaded,
    ) -> RestoredState:
        """Return the state on the devices: as it is there already, or verified, fetched, placed."""
        parts, request, made_of = self._parts, self._request, None
        if self._placed is not None:
            leaves, crcs = shards.made_of(part)
            made_of = MadeOf(save, request.tree, request.host_types(), leaves, crcs)
            found = self._placed.find(made_of)
            if found is not None and shards.holds_all(part, found.gathered):
                return dataclasses.replace(found, is_prefetched=True)
            del found
            self._placed.release("not all that this process keeps is in its RAM")
        with shards.collecting(part) as arrivals:
            state = materialize(
                request.tree, request.like, shards.bytes_of, arrivals, shards.dtype_of
            )
        tally = shards.tally
        parts.events.emit(
            "restore.fetched", step=plan.step, bytes_local=tally.local, bytes_peer=tally.peer
        )
        for holder, nbytes in sorted(tally.by_holder.items()):
            parts.events.emit("restore.received", step=plan.step, holder=holder, size_bytes=nbytes)
        tier: TierName = LOCAL
        if loaded.save == save:
            # Bytes that this process just read from storage do not count as found in its RAM.
            tally.local = max(0, tally.local - loaded.nbytes)
            tally.persistent, tier = loaded.nbytes, PERSISTENT
        return RestoredState(
            plan.step, save, tier, state, [], tally, (), shards.gathered, made_of=made_of
        )


def _carry_out(work: Callable[[], _T], plan: RestorePlan | LoadPlan) -> tuple[_T | None, Status]:
    """Return the result of ``work``, or None and its error, which is told to all processes."""
    try:
        return work(), Status()
    except Exception as error:  # noqa: BLE001 - becomes the collective error of all processes
        # Its frames hold what was placed already, and so memory that the next attempt needs.
        traceback.clear_frames(error.__traceback__)
        return None, _status_of(error, plan)


def _status_of(error: Exception, plan: RestorePlan | LoadPlan) -> Status:
    """Return the copies to blame, if any: a step from storage as a whole, those in RAM by one."""
    if isinstance(error, CopiesFailed):
        return Status(str(error), error.unusable)
    is_load = isinstance(plan, LoadPlan)
    lacks = isinstance(error, PersistentTierError) and not error.unreachable
    if lacks or (isinstance(error, CorruptData) and is_load):
        return Status(str(error)[:ERROR_LIMIT_CHARS], (persistent_unusable(plan.step),))
    if isinstance(error, CorruptData):
        return Status(str(error)[:ERROR_LIMIT_CHARS])
    text = f"{type(error).__name__}: {error}"[:ERROR_LIMIT_CHARS]
    return Status(text, kind=failure_kind(error))


def _quarantine_outvoted(
    tier: LocalTier,
    events: EventSink,
    save: SaveId,
    holder: str,
    outvoted: Mapping[str, tuple[int, ...]],
) -> None:
    """Mark copies that a majority of their holders contradicts as damaged.

    Each manifest is told of once, by ``restore.quarantined``.

    Their bytes fit their CRC, so nothing but this mark keeps them from being used or served until
    the restore has put the majority's in their place and unpublished their slot.
    """
    for digest, shards in outvoted.items():
        contents = tier.contents(digest)
        if contents is None:
            continue  # it is not held any more
        known = tier.quarantined_shards(digest)
        new = [shard for shard in shards if shard not in known]
        for shard in new:
            tier.quarantine(digest, shard, _OUTVOTED)
        if new:
            events.emit(
                "restore.quarantined",
                step=save.step,
                holder=holder,
                shard=few(map(_name, map(contents.shard_id, new))),
                detail=_OUTVOTED,
            )


def _name(shard: ShardId) -> str:
    return f"{shard.leaf}{describe(shard.box)}"
