"""The leader's part of a restore: gather, plan, judge. Everyone's data, no bytes of tensors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import msgspec

from emergency_ckpt.background import no_garbage_collection
from emergency_ckpt.core.restore.candidates import PERSISTENT_HOLDER
from emergency_ckpt.core.restore.inventory import Inventory, PersistentStep
from emergency_ckpt.core.restore.leaves.stored_leaves import match_leaves
from emergency_ckpt.core.restore.majority import name_outvoted
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan, TargetSet
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.core.timeline import Timeline, newest
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    PersistentTierError,
    RestoreFailed,
)
from emergency_ckpt.restore.extra_holders import ask_extra_holders
from emergency_ckpt.restore.planning import (
    may_precede,
    next_incarnation,
    persistent_unusable,
    steps_in_words,
)
from emergency_ckpt.restore.protocol import (
    Answer,
    FailureKind,
    LoadPlan,
    Report,
    Status,
    Verdict,
    WholeSteps,
)
from emergency_ckpt.restore.replica_disputes import ReplicaDisputes
from emergency_ckpt.restore.request import RestoreParts, RestoreRequest
from emergency_ckpt.restore.shards.holder_calls import HolderCalls
from emergency_ckpt.restore.shards.manifest_reads import ManifestReads, passed_over_unread
from emergency_ckpt.restore.storage.candidates import StoredCandidates
from emergency_ckpt.restore.storage.load_plan import loaded_copies, plan_load
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.types import SaveId

MAX_ATTEMPTS = 16
MAX_LOADS = 2
_NAMED_HOLDERS = 64
"""So often a persistent step is loaded in one restore, should copies of it fail in RAM."""
LISTING_TIMEOUT_S = 30.0
"""Longest wait for the list of persistent steps when RAM alone holds a whole step."""


class RestoreLeader:
    """Plans one restore, again after each attempt that failed on some copy.

    A persistent step is restored in two plans: one to load it into RAM, and, when all have
    reported anew, one like that of any step in RAM. ``greatest``: the greatest number of a life
    that any process reported, also where nothing is to be planned.
    """

    def __init__(
        self,
        parts: RestoreParts,
        request: RestoreRequest,
        targets: Mapping[int, TargetSet],
        calls: HolderCalls,
        *,
        deadline_s: float,
    ) -> None:
        """``targets``: the shards that each process needs. ``deadline_s``: of the restore."""
        self._parts = parts
        self._persistent = parts.persistent
        self._events = parts.events
        self._requested_step = request.requested_step
        self._targets = targets
        self._leaves = request.tree.wanted
        self._deadline_s = deadline_s
        self._manifests = ManifestReads(parts.tier, parts.client, calls, parts.events)
        self._disputes = ReplicaDisputes(parts.persistent, parts.events, deadline_s)
        self._inventory = Inventory((), {})
        self._wants_host_state = False
        self._candidates: StoredCandidates | None = None
        self._steps: tuple[PersistentStep, ...] | None = None
        self._ready: RestorePlan | None = None
        self._persistent_error: CheckpointError | None = None
        self._load: LoadPlan | None = None  # under way, or carried out and not yet reported
        self._loads: Counter[int] = Counter()
        self._is_news = False
        self._asks_left = MAX_ATTEMPTS
        self._has_lost_stored = False
        self._attempts = 0
        self._last_failure = ""
        self.greatest = 0

    def take_reports(self, reports: Mapping[int, Report]) -> None:
        """Build the inventory. RestoreFailed when the processes want different states."""
        groups: dict[str, list[int]] = {}
        for process, report in sorted(reports.items()):
            groups.setdefault(report.state_digest, []).append(process)
        if len(groups) > 1:
            sides = " / ".join(str(group[:8]) for group in groups.values())
            raise RestoreFailed(
                "restore", "the state", f"the processes ask for different leaves or shapes: {sides}"
            )
        self._wants_host_state = any(report.wants_host_state for report in reports.values())
        holders = [report.inventory for _, report in sorted(reports.items())]
        holders += ask_extra_holders(
            self._parts.client, self._events, self._parts.config.extra_holders, self._deadline_s
        )
        self._inventory = Inventory(
            tuple(holders),
            self._manifests.read(holders),
            quarantined=self._inventory.quarantined,
            timeline=newest(self._inventory.timeline, *(each.timeline for each in holders)),
        )
        ready: RestorePlan | None = None
        if self._steps is None:
            ready, self._steps = self._persistent_steps()
        loaded, self._load = self._load, None
        self._inventory = msgspec.structs.replace(
            self._inventory,
            persistent=self._steps,
            quarantined=self._inventory.quarantined
            - (set() if loaded is None else loaded_copies(loaded, self._inventory)),
        )
        # Of one save, RAM goes first: only another one in storage asks for a plan with both.
        newer = ready is not None and any(may_precede(item, ready) for item in self._steps)
        self._ready = None if newer or self._is_news else ready

    def _persistent_steps(self) -> tuple[RestorePlan | None, tuple[PersistentStep, ...]]:
        """The plan for RAM alone, when that was needed and there is one, and storage's steps."""
        if self._persistent is None:
            return None, ()
        candidates = StoredCandidates(self._persistent, self._events, self._requested_step)
        left_s = self._deadline_s - time.monotonic()
        answer = self._plan_from_inventory()
        in_ram = answer if isinstance(answer, RestorePlan) else None
        # RAM must not wait long for storage that is down; without RAM there is nothing else.
        limit_s = left_s / 2 if in_ram is None else min(LISTING_TIMEOUT_S, left_s / 8)
        try:
            deadline_s = time.monotonic() + limit_s
            candidates.ask(deadline_s)
            self._learn_timeline(candidates.timeline(deadline_s))
        except (PersistentTierError, CorruptData) as error:
            # RAM may well be enough. When it is not, this error is the answer: see plan().
            self._persistent_error = error
            self._events.emit("restore.persistent_unreachable", reason=str(error))
            return in_ram, ()
        self._candidates = candidates
        return in_ram, candidates.offered

    def _learn_timeline(self, stored: Timeline | None) -> None:
        known = newest(self._inventory.timeline, stored)
        if known != self._inventory.timeline:
            self._inventory = msgspec.structs.replace(self._inventory, timeline=known)
            self._is_news = True

    def plan(self) -> Answer:
        """Return the plan for the copies that are known to be usable now."""
        self._load = None
        while True:
            ready, self._ready = self._ready, None
            answer = ready or self._plan_from_inventory()
            if self._read_more(answer) or self._offer_newer() or self._offer_older(answer):
                continue
            if not isinstance(answer, RestorePlan):
                return self._without_plan(answer)
            if answer.save is not None:
                settled = self._settle(answer)
                if settled is None:
                    continue
                self._tell_holders(answer.save)
                return settled
            assert self._persistent is not None, "else there is no persistent step to choose"
            if self._loads[answer.step] >= MAX_LOADS:
                self._cancel(answer.step, _not_again(answer.step, self._last_failure))
                continue
            try:
                planned = self._plan_load(answer, self._persistent)
            except (PersistentTierError, CorruptData) as error:
                if isinstance(error, PersistentTierError) and error.unreachable:
                    raise  # that says nothing about the step: an older one is no answer
                self._cancel(answer.step, str(error))
                continue
            self._load = planned if isinstance(planned, LoadPlan) else None
            self._loads[answer.step] += 1
            return planned

    def _tell_holders(self, save: SaveId) -> None:
        found = [
            each.holder
            for each in self._inventory.holders
            if any(held.save == save for held in each.tensors)
        ]
        self._events.emit(
            "restore.holders", step=save.step, count=len(found), holders=found[:_NAMED_HOLDERS]
        )

    def _offer_newer(self) -> bool:
        """Ask storage for newer steps when one could not be loaded; return whether any came.

        PersistentTierError when storage does not answer: an older step is no answer then.
        """
        lost, self._has_lost_stored = self._has_lost_stored, False
        if not lost or self._candidates is None or self._asks_left == 0:
            return False
        self._asks_left -= 1
        return self._candidates.ask_again(self._deadline_s) and self._take_offered()

    def _offer_older(self, answer: RestorePlan | NoPlan) -> bool:
        """Ask storage for older steps; return whether any came in that ``answer`` did not know."""
        candidates = self._candidates
        if candidates is None or not candidates.ask_older(answer, self._deadline_s):
            return False
        return self._take_offered()

    def _take_offered(self) -> bool:
        assert self._candidates is not None, "it has just been asked"
        self._steps = self._candidates.offered
        self._inventory = msgspec.structs.replace(self._inventory, persistent=self._steps)
        return True

    def _read_more(self, answer: RestorePlan | NoPlan) -> bool:
        """Read manifests again, of saves newer than ``answer``; return whether any was to be read.

        HolderUnreachable when they still cannot be read at the deadline.
        """
        unread = self._manifests.unread.items()
        digests = passed_over_unread(
            answer,
            unread,
            self._requested_step,
            stored={item.step: item.incarnation for item in self._inventory.persistent},
            loaded_steps=self._loads.keys(),
        )
        if digests:
            manifests = self._manifests.read_again(digests)
            self._inventory = msgspec.structs.replace(self._inventory, manifests=manifests)
        return bool(digests)

    def _settle(self, plan: RestorePlan) -> RestorePlan | NoPlan | None:
        """The plan without a copy that a majority of its holders contradicts.

        None when it names such copies: they are quarantined now, and a new plan is due.
        """
        assert plan.save is not None, "a persistent step has no replicas"
        with no_garbage_collection():
            ruling = self._disputes.settle(self._inventory, plan.save)
        if not ruling.outvoted <= self._inventory.quarantined:
            quarantined = self._inventory.quarantined | ruling.outvoted
            self._inventory = msgspec.structs.replace(self._inventory, quarantined=quarantined)
            return None
        if ruling.undecided and self._parts.config.on_divergence == "stop":
            lines = self._disputes.lines(ruling)
            return NoPlan("diverged", step=plan.step, rejected=plan.rejected, missing=lines)
        plan = msgspec.structs.replace(plan, timeline=self._inventory.timeline)
        return name_outvoted(plan, self._inventory, ruling) if ruling.outvoted else plan

    def whole_steps(self) -> WholeSteps:
        """Return the steps that could be restored, instead of a plan. Errors as of ``plan``."""
        if self._manifests.unread:
            manifests = self._manifests.read_again(list(self._manifests.unread))
            self._inventory = msgspec.structs.replace(self._inventory, manifests=manifests)
        held = {each.save.step for h in self._inventory.holders for each in h.tensors}
        local = tuple(step for step in sorted(held) if self._is_whole_in_ram(step))
        if self._persistent is None:
            return WholeSteps(local)
        if self._persistent_error is not None:
            if not local:
                raise self._persistent_error
            return WholeSteps(local)
        steps = [found for found in self._steps or () if not found.problem]
        steps += self._persistent.found.whole(self._deadline_s)
        known = self._inventory.timeline
        stored = {
            found.step
            for found in steps
            if known is None or not known.objection(found.step, found.incarnation)
        }
        return WholeSteps(local, tuple(sorted(stored)))

    def _is_whole_in_ram(self, step: int) -> bool:
        plan = self._plan(msgspec.structs.replace(self._inventory, persistent=()), step)
        # What only does not fit the job as it is now is there nevertheless: a restore says so.
        unfit = ("state_mismatch", "host_state_count")
        return isinstance(plan, RestorePlan) or plan.kind in unfit

    def _plan_from_inventory(self) -> RestorePlan | NoPlan:
        step = self._requested_step
        # Who asks for a step by its number means it, also one that was rolled back.
        return self._plan(self._inventory, step, takes_rolled_back=step is not None)

    def _plan(
        self, inventory: Inventory, requested_step: int | None, *, takes_rolled_back: bool = False
    ) -> RestorePlan | NoPlan:
        with no_garbage_collection():
            return plan_restore(
                inventory,
                self._targets,
                self._leaves,
                requested_step=requested_step,
                host_state_remap=self._parts.config.host_state_remap is not None,
                needs_host_state=self._wants_host_state,
                takes_rolled_back=takes_rolled_back,
            )

    def _without_plan(self, answer: NoPlan) -> NoPlan:
        if self._persistent_error is not None and answer.kind in (
            "nothing",
            "unrecoverable",
            "step_not_found",
        ):
            raise self._persistent_error
        if self._last_failure:
            answer = msgspec.structs.replace(answer, missing=(*answer.missing, self._last_failure))
        if answer.kind == "step_not_found":
            missing = (*answer.missing, self._what_there_is())
            answer = msgspec.structs.replace(answer, missing=missing)
        return answer

    def _what_there_is(self) -> str:
        """Return the steps that could be asked for instead, in words."""
        try:
            steps = self.whole_steps()
        except CheckpointError as error:
            return f"what else there is cannot be told: {error}"
        named = {"RAM": steps.local, "storage": steps.persistent}
        texts = [f"{tier} has {steps_in_words(found)}" for tier, found in named.items() if found]
        return " and ".join(texts) or "no tier has any whole step"

    def _plan_load(self, plan: RestorePlan, persistent: PersistentTier) -> LoadPlan | NoPlan:
        """Return the plan to load a persistent step, or the reason why it must not be restored."""
        left_s = self._deadline_s - time.monotonic()
        stored = persistent.describe(plan.step, time.monotonic() + left_s / 3)
        if stored.doubt and not self._loads[plan.step]:
            self._events.emit("restore.unsigned", step=plan.step, reason=stored.doubt)
        arrays, mismatches = match_leaves(
            self._leaves, stored.leaves, stored.marker and stored.marker.leaves
        )
        if mismatches:
            return NoPlan("state_mismatch", step=plan.step, mismatches=mismatches)
        if (
            stored.marker is None
            and self._wants_host_state
            and not self._parts.config.allow_missing_host_state
        ):
            return NoPlan("no_host_state", step=plan.step)
        return plan_load(
            plan,
            stored,
            arrays,
            self._targets,
            self._leaves,
            self._parts.config.run_name,
            wants_host_state=self._wants_host_state,
            on_this_machine=persistent.is_on_this_machine(),
        )

    def _cancel(self, step: int, reason: str) -> None:
        """Take a persistent step out of the next plan."""
        self._last_failure = reason
        self._has_lost_stored = True
        self._inventory = msgspec.structs.replace(
            self._inventory, quarantined=self._inventory.quarantined | {persistent_unusable(step)}
        )
        self._events.emit("restore.replanned", attempt=self._attempts, reason=reason[:500])

    def decide(self, statuses: Mapping[int, Status]) -> Verdict:
        """Done when all went well; once more when copies were found unusable; else the end."""
        failed = {p: s for p, s in sorted(statuses.items()) if s.error}
        if not failed:
            if self._load is not None:
                return Verdict(done=True)
            return Verdict(done=True, incarnation=next_incarnation(self._inventory, self.greatest))
        found = {q for status in statuses.values() for q in status.unusable}
        new = found - self._inventory.quarantined
        self._attempts += 1
        text = "; ".join(f"process {p}: {s.error}" for p, s in list(failed.items())[:4])
        not_retryable = any(not status.unusable for status in failed.values())
        self._last_failure = text
        if not_retryable or not new or self._attempts >= MAX_ATTEMPTS:
            fatal = [status for status in failed.values() if not status.unusable]
            kinds: set[FailureKind] = {status.kind for status in fatal}
            return Verdict(error=text, kind=kinds.pop() if len(kinds) == 1 else "failed")
        self._has_lost_stored = any(each.holder == PERSISTENT_HOLDER for each in new)
        self._inventory = msgspec.structs.replace(
            self._inventory, quarantined=self._inventory.quarantined | new
        )
        self._events.emit("restore.replanned", attempt=self._attempts, reason=text[:500])
        return Verdict()


def _not_again(step: int, reason: str) -> str:
    return f"step {step} was loaded from storage {MAX_LOADS} times; then {reason}"
