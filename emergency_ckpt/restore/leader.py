"""The leader's part of a restore: gather, choose, judge. The leader reads no bytes of tensors.

``RestoreLeader.answer`` is the rule of every round:

1. The leader takes the inventories of all processes, the step log, and one listing of storage. The
   leader reads manifests, each once over the job, only where the reported sets of shards do not
   suffice (``core.restore.restore_plan``).
2. ``core.restore`` chooses the step. A step in storage is inspected before it is chosen for good,
   and is first loaded into RAM; then all report again, and 1 and 2 follow once more.
3. The leader judges how all parts went: the restore is done, or starts once more from 2 without the
   copies that failed, or ends with an error.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec
from absl import logging

from emergency_ckpt.background import no_garbage_collection
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.timelines import told_of_wait
from emergency_ckpt.core.restore.divergence import Divergence, divergences
from emergency_ckpt.core.restore.inventory import (
    MANY_LIVES,
    Inventory,
    PersistentStep,
    Quarantined,
    RestoredSave,
    lives_from,
    newest_timeline,
    persistent_unreadable,
    persistent_unusable,
    suspicion,
)
from emergency_ckpt.core.restore.leaves import match_leaves
from emergency_ckpt.core.restore.plan_types import NoPlan, RestorePlan, TargetSet
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.core.timeline import is_plain, is_same_save, new_incarnation, number_of
from emergency_ckpt.errors import CheckpointError, CorruptData, PersistentTierError
from emergency_ckpt.restore.holders import (
    HolderCalls,
    ManifestReads,
    passed_over_unread,
)
from emergency_ckpt.restore.request import CompleteSteps, RestoreRequest
from emergency_ckpt.restore.rounds import (
    AllDone,
    Answer,
    Failed,
    FailureKind,
    Report,
    Row,
    Status,
)
from emergency_ckpt.restore.storage_load import LoadPlan, loaded_copies, plan_load
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.storage.step_folders import INSPECTED_AT_ONCE
from emergency_ckpt.storage.steps import StoredView
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import PERSISTENT, SaveId

MAX_LOADS = 2
"""So often a persistent step is loaded in one restore, if copies of the step fail in RAM."""
LISTING_TIMEOUT_S = 30.0
"""Longest wait for the list of persistent steps when RAM alone holds a complete step."""
_DESCRIBED_IN_STALLS = 3
_MOST_INSPECTED = 256
_LOST_MARKER = (
    "its folder below host_state is gone, and with it the host states and their marker; to take its"
    " tensors alone, call restore without host_state"
)
_NOTHING_LEFT = ("nothing", "unrecoverable")
_NAMED_STEPS = 10
_NAMED_SHARDS = 16
"""So many shards are named, each in its own line; for the others the line has only the number."""


class RestoreLeader:
    """Chooses the step of one restore, again after each attempt that failed on some copy.

    A persistent step is restored in two answers: the first is to load the step into RAM; after all
    have reported anew, the second is as for any step in RAM.
    """

    def __init__(
        self,
        job: Job,
        request: RestoreRequest,
        targets: Mapping[int, TargetSet],
        calls: HolderCalls,
        end_s: float,
    ) -> None:
        """``targets``: the shards that each process needs. ``end_s``: of ``time.monotonic``."""
        self._job = job
        self._persistent = job.persistent
        self._events = job.events
        self._requested_step = request.requested_step
        self._targets = targets
        self._leaves = request.tree.wanted
        self._limits = job.config.time_limits
        self._end_s = end_s
        self._progress = calls.progress
        self._manifests = ManifestReads(job.holdings, calls)
        self._inventory = Inventory((), {})
        self._wants_host_state = False
        self._leaves_out = request.tensors_only  # no warning is due, or it was given
        self._view: StoredView | None = None
        self._stored: dict[int, PersistentStep] = {}
        self._has_asked = False
        self._sufficed: RestorePlan | None = None  # in RAM; storage was not waited for any longer
        self._persistent_error: CheckpointError | None = None
        self._step: int | None = None  # of the last answer
        self._load: LoadPlan | None = None  # of the last answer
        self._loaded: SaveId | None = None  # the last save that all have loaded into RAM
        self._loads: Counter[int] = Counter()
        self._has_reported_loss = False
        self._reported_divergences: set[Divergence] = set()
        self._reported_suspects: set[SaveId] = set()
        self._inspected_at_once = INSPECTED_AT_ONCE
        self._attempts = 0
        self._last_failure = ""
        self._restored: tuple[RestoredSave, ...] = ()
        self._greatest = 0  # number of an incarnation that a report or storage named

    @property
    def _deadline_s(self) -> float:
        """Return the deadline of a request to storage that begins now."""
        return min(self._end_s, time.monotonic() + self._limits.stall_s)

    def answer(self, rows: Mapping[int, Row]) -> Answer:
        """Return what all processes do next, after what their ``rows`` report."""
        self._progress.begin("plan")
        try:
            ready: RestorePlan | None = None
            failed = any(row.status.error for row in rows.values())
            reports = {p: row.report for p, row in rows.items() if row.report is not None}
            if not failed and len(reports) == len(rows):
                ready = self.take_reports(reports)
            else:
                end = self._judge({p: row.status for p, row in rows.items()})
                if end is not None:
                    return end
            return self.plan(ready)
        finally:
            self._progress.begin("")

    def survey(self, rows: Mapping[int, Row]) -> CompleteSteps:
        """Return the steps that could be restored. Errors as of ``answer``."""
        self.take_reports({p: row.report for p, row in rows.items() if row.report is not None})
        return self._complete_steps()

    def take_reports(self, reports: Mapping[int, Report]) -> RestorePlan | None:
        """Build the inventory from the reports of processes that all want the same state.

        Returns the plan for RAM if storage was asked and has no better step.
        """
        self._wants_host_state = any(report.wants_host_state for report in reports.values())
        holders = [report.inventory for _, report in sorted(reports.items())]
        self._greatest = max(self._greatest, *(holder.greatest for holder in holders))
        self._restored = tuple(save for report in reports.values() for save in report.restored)
        damaged = {
            Quarantined(report.inventory.holder, digest, shard)
            for report in reports.values()
            for digest, shards in report.damaged.items()
            for shard in shards
        }
        table = None if self._view is None else self._view.table  # as in the decision before
        self._inventory = Inventory(
            tuple(holders),
            self._manifests.note(holders),
            quarantined=self._inventory.quarantined | damaged,
            timeline=newest_timeline(holders, self._inventory.timeline, table),
            needs={p: r.needs for p, r in reports.items() if r.needs is not None},
        )
        ready: RestorePlan | None = None
        if self._persistent is not None and not self._has_asked:
            self._has_asked = True
            ready = self._ask_storage(self._persistent)
        if self._load is not None:
            self._loaded = self._load.save
            loaded = [d for d, save in self._manifests.unread.items() if save == self._loaded]
            self._replace(manifests=self._manifests.read(loaded, is_patient=False))
            replaced = loaded_copies(self._load, self._inventory)
            self._replace(quarantined=self._inventory.quarantined - replaced)
        return ready

    def plan(self, ready: RestorePlan | None = None) -> Answer:
        """Return the choice among the copies that are not known to be unusable.

        ``ready``: the choice that was just made of the same copies.
        """
        self._step = self._load = None
        while True:
            answer = ready or self._plan_from_inventory()
            ready = None
            if (
                self._read_more(answer, is_patient=False)
                or self._read_more(answer, is_patient=True)
                or self._ask_storage_again(answer)
            ):
                continue
            if not isinstance(answer, RestorePlan):
                return self._without_plan(answer)
            if self._persistent_error is not None and self._is_behind_storage(answer):
                raise self._persistent_error  # manifests that came late gave no plan before
            self._report_suspect(answer)
            self._step = answer.step
            if answer.save is not None:
                return self._settled(answer, answer.save)
            assert self._persistent is not None, "else there is no persistent step to choose"
            stored_step = persistent_unusable(answer.step)
            if self._loads[answer.step] >= MAX_LOADS:
                reason = f"step {answer.step} was loaded from storage {MAX_LOADS} times; then"
                self._leave_out([stored_step], f"{reason} {self._last_failure}")
                continue
            try:
                planned = self._plan_stored(answer, self._persistent)
            except (PersistentTierError, CorruptData) as error:
                if isinstance(error, PersistentTierError) and error.unreachable:
                    raise  # the step may well be usable: an older step must not replace it
                self._leave_out([stored_step], str(error))
                continue
            if planned is None:
                continue
            self._load = planned if isinstance(planned, LoadPlan) else None
            self._loads[answer.step] += 1
            return planned

    def _judge(self, statuses: Mapping[int, Status]) -> AllDone | Failed | None:
        """Return the end, good or bad; None to choose again, after copies were found unusable."""
        failed = {p: s for p, s in sorted(statuses.items()) if s.error}
        if not failed:
            all_kept = not any(status.lacks_room for status in statuses.values())
            return AllDone(self._next_incarnation(), all_kept)
        unusable = {q for status in statuses.values() for q in status.unusable}
        new = unusable - self._inventory.quarantined
        self._attempts += 1
        text = "; ".join(f"process {p}: {s.error}" for p, s in list(failed.items())[:4])
        fatal = [status for status in failed.values() if not status.unusable]
        # Each further attempt leaves out copies that counted before: so the attempts end.
        if fatal or not new:
            kinds: set[FailureKind] = {status.kind for status in fatal}
            kind: FailureKind = kinds.pop() if len(kinds) == 1 else "failed"
            return Failed(text, kind, "the job" if self._step is None else f"step {self._step}")
        if self._persistent is not None and any(copy.holder == PERSISTENT for copy in new):
            self._has_news(self._persistent)
        self._leave_out(new, text)
        return None

    def _leave_out(self, unusable: Collection[Quarantined], reason: str) -> None:
        """Leave copies, or a step in storage, out of the next choices."""
        self._last_failure = reason
        self._replace(quarantined=self._inventory.quarantined.union(unusable))
        self._events.emit(
            "restore.stage", stage="replanned", attempt=self._attempts, reason=reason[:500]
        )

    def _complete_steps(self) -> CompleteSteps:
        """Return the steps that could be restored, by the processes' reports and storage."""
        local: tuple[int, ...] = ()
        for step in sorted({save.step for save in self._saves_in_ram}):
            plan = self._plan(self._inventory, step)
            unread = [d for d, save in self._manifests.unread.items() if save.step == step]
            if unread and not isinstance(plan, RestorePlan):
                self._replace(manifests=self._manifests.read(unread, is_patient=True))
                plan = self._plan(self._inventory, step)
            # A complete step that does not fit the present job counts: a restore tells why.
            if isinstance(plan, RestorePlan) or plan.kind in ("state_mismatch", "host_state_count"):
                local = (*local, step)
        if self._persistent is None:
            return CompleteSteps(local)
        if self._persistent_error is not None:
            if not local:
                raise self._persistent_error
            return CompleteSteps(local)
        assert self._view is not None, "storage has answered"
        unseen = [item for item in self._stored.values() if not item.is_seen]
        self._inspect(self._persistent, self._view, unseen, self._deadline_s)
        timeline = self._inventory.timeline
        stored = {
            item.step
            for item in self._stored.values()
            if not item.problem
            and (timeline is None or not timeline.rejection_reason(item.step, item.incarnation))
        }
        return CompleteSteps(local, tuple(sorted(stored)))

    # Plans of what is known.

    @property
    def _saves_in_ram(self) -> set[SaveId]:
        return {copy.save for holder in self._inventory.holders for copy in holder.tensors}

    def _plan_from_inventory(self) -> RestorePlan | NoPlan:
        step, stored = self._requested_step, tuple(sorted(self._stored.values()))
        inventory = msgspec.structs.replace(self._inventory, persistent=stored)
        # A step that was asked for by its number is meant, even if it was rolled back.
        return self._plan(inventory, step, takes_rolled_back=step is not None)

    def _plan(
        self, inventory: Inventory, requested_step: int | None, *, takes_rolled_back: bool = False
    ) -> RestorePlan | NoPlan:
        with no_garbage_collection():
            return plan_restore(
                inventory,
                self._targets,
                self._leaves,
                requested_step=requested_step,
                host_state_remap=self._job.config.host_state_remap is not None,
                needs_host_state=self._wants_host_state,
                takes_rolled_back=takes_rolled_back,
            )

    def _report_suspect(self, answer: RestorePlan) -> None:
        """Report once a save from which many lives in a row began. It is restored all the same."""
        save = answer.save
        if save is None:
            incarnation = self._stored[answer.step].incarnation
            save = SaveId(answer.step, incarnation, self._job.config.run_name)
        suspect = RestoredSave(save, self._lives_from(save))
        is_known = self._requested_step is not None or save in self._reported_suspects
        if is_known or suspect.lives < MANY_LIVES:
            return
        self._reported_suspects.add(save)
        reached = max([save.step, *(other.step for other in self._saves_in_ram)])
        self._events.emit(
            "restore.suspect",
            step=save.step,
            lives=suspect.lives,
            reached=reached,
            text=suspicion(suspect, reached),
        )

    def _lives_from(self, save: SaveId) -> int:
        entry = None if self._view is None else self._view.entry(save.step, save.incarnation)
        listed = [] if entry is None else [RestoredSave(save, entry.lives)]
        return lives_from(save, [*self._restored, *listed])

    def _read_more(self, answer: RestorePlan | NoPlan, *, is_patient: bool) -> bool:
        """Read manifests of saves that would be preferred to ``answer``; return whether any was.

        ``is_patient`` and errors: as of ``ManifestReads.read``. Saves that do not count are not
        waited for.
        """
        unread = self._manifests.unread if is_patient else self._manifests.unasked
        timeline = self._inventory.timeline
        if not is_patient and isinstance(answer, NoPlan) and answer.kind in _NOTHING_LEFT:
            timeline = None  # saves that do not count still prove that there was a step
        if timeline is not None and self._requested_step is None:
            reason = timeline.rejection_reason
            unread = {d: x for d, x in unread.items() if not reason(x.step, x.incarnation)}
        digests = passed_over_unread(
            answer,
            unread.items(),
            self._requested_step,
            stored={item.step: item.incarnation for item in self._stored.values()},
            loaded_steps=self._loads.keys(),
            is_patient=is_patient,
        )
        if digests:
            self._replace(manifests=self._manifests.read(digests, is_patient=is_patient))
        return bool(digests)

    def _without_plan(self, answer: NoPlan) -> NoPlan:
        if self._persistent_error is not None and (
            answer.kind in _NOTHING_LEFT or answer.kind == "step_not_found"
        ):
            raise self._persistent_error
        if self._last_failure:
            answer = msgspec.structs.replace(answer, missing=(*answer.missing, self._last_failure))
        if answer.kind == "step_not_found":
            missing = (*answer.missing, self._what_there_is())
            answer = msgspec.structs.replace(answer, missing=missing)
        return answer

    def _what_there_is(self) -> str:
        """Return, in words, the steps that could be asked for instead."""
        try:
            steps = self._complete_steps()
        except CheckpointError as error:
            return f"the other steps cannot be listed: {error}"
        texts: list[str] = []
        for tier, of_tier in (("RAM", steps.local), ("storage", steps.persistent)):
            if of_tier:
                numbers = ", ".join(map(str, of_tier[-_NAMED_STEPS:]))
                left_out = len(of_tier) - _NAMED_STEPS
                older = f" and {left_out} older" if left_out > 0 else ""
                texts.append(f"{tier} has step{'s' * (len(of_tier) > 1)} {numbers}{older}")
        return " and ".join(texts) or "no tier has any complete step"

    def _next_incarnation(self) -> str:
        """Return the id of an incarnation after all that are on record anywhere. RestoreFailed.

        Unusable steps in storage do not count here: otherwise a bad marker would choose the number.
        """
        ids = [item.incarnation for item in self._stored.values() if not item.problem]
        if self._inventory.timeline is not None:
            ids.append(self._inventory.timeline.head)
        greatest = max([self._greatest, *map(number_of, ids)])
        return new_incarnation(greatest, secrets.token_hex(8))

    def _replace(self, **changes: object) -> None:
        self._inventory = msgspec.structs.replace(self._inventory, **changes)

    def _settled(self, plan: RestorePlan, save: SaveId) -> RestorePlan:
        """Return the plan with all that the processes need; report what the user should know."""
        states = (document for holder in self._inventory.holders for document in holder.host_states)
        if any(document.save == save and not document.empty for document in states):
            self._warn_left_out(save.step)
        with no_garbage_collection():
            differing = divergences(self._inventory, save)
        lines = [
            divergence.describe()
            for divergence in differing
            if divergence not in self._reported_divergences
        ]
        self._reported_divergences.update(differing)
        if len(lines) > _NAMED_SHARDS:
            more = f"copies of {len(lines) - _NAMED_SHARDS} more shards differ"
            lines = [*lines[:_NAMED_SHARDS], more]
        for text in lines:
            self._events.emit("divergence", step=save.step, text=text)
        return msgspec.structs.replace(
            plan,
            timeline=self._inventory.timeline,
            lives=self._lives_from(save),
            is_loaded=save == self._loaded,
        )

    # Storage.

    def _ask_storage(self, tier: PersistentTier) -> RestorePlan | None:
        """Ask for the steps in storage; return the plan for RAM if storage has no better step."""
        answer = self._plan_from_inventory()
        while self._read_more(answer, is_patient=False):
            answer = self._plan_from_inventory()
        in_ram = answer if isinstance(answer, RestorePlan) else None
        timeline_before = self._inventory.timeline
        is_behind = self._is_behind_storage(in_ram)
        error = self._list_storage(tier, is_brief=in_ram is not None and not is_behind)
        if error is not None:
            if is_behind:
                raise error  # saves of RAM would roll the newer step back
            # RAM may well be enough. If not, see ``_ask_storage_again`` and ``_without_plan``.
            self._sufficed = in_ram
            # The log may have been read before a file failed: then it has its part in the choice.
            return in_ram if self._view is None else None
        if in_ram is not None and self._inventory.timeline != timeline_before:
            return None  # the log has a newer chain
        if in_ram is None or in_ram.save is None:
            return None
        # RAM's copy of a save goes first: only another save in storage needs a plan with both.
        step, incarnation = in_ram.step, in_ram.save.incarnation
        for stored in self._stored.values():
            if stored.step > step or (stored.step == step and stored.incarnation != incarnation):
                return None
        return in_ram

    def _is_behind_storage(self, in_ram: RestorePlan | None) -> bool:
        """Return whether storage had a newer step that still counts, as a holder has on record."""
        if in_ram is None or self._requested_step is not None:
            return False
        timeline = self._inventory.timeline
        stored = {h.known_stored for h in self._inventory.holders if h.known_stored is not None}
        return any(
            save.step > in_ram.step
            and not (timeline and timeline.rejection_reason(save.step, save.incarnation))
            for save in stored
        )

    def _ask_storage_again(self, answer: RestorePlan | NoPlan) -> bool:
        """Ask storage with more patience where ``answer`` is worse than the step that sufficed.

        Returns whether storage was asked. Raises the error of storage if storage may have the
        better step and RAM has only an older one.
        """
        first = self._sufficed
        if self._persistent is None or first is None or self._persistent_error is None:
            return False
        is_plan = isinstance(answer, RestorePlan)
        if is_plan and (answer.step > first.step or answer.save == first.save):
            return False
        self._sufficed = None
        error = self._list_storage(self._persistent, is_brief=False)
        if error is not None and is_plan:
            raise error
        return True

    def _list_storage(self, tier: PersistentTier, *, is_brief: bool) -> CheckpointError | None:
        """Take the log and a listing of storage; return the error, which is noted, if there is one.

        ``is_brief``: a step in RAM must not wait long for storage that is down. Without one,
        storage is all.
        """
        left_s = self._end_s - time.monotonic()
        limit_s = min(self._job.config.start_timeout_s / 2, left_s / 2)
        if is_brief:
            limit_s = min(LISTING_TIMEOUT_S, left_s / 8)
        deadline_s = time.monotonic() + limit_s
        try:
            with told_of_wait(self._events, tier.directory, deadline_s):
                self._take_view(tier, deadline_s)
            self._persistent_error = None
        except (PersistentTierError, CorruptData) as error:
            self._persistent_error = error
            self._events.emit("persistent.problem", cause="unreachable", reason=str(error))
        return self._persistent_error

    def _take_view(self, tier: PersistentTier, deadline_s: float) -> None:
        """Read the step log and one listing. PersistentTierError, CorruptData."""
        view = tier.found.view(deadline_s)
        for fault in view.log.faults:
            reason = str(fault)[:500]
            self._events.emit("persistent.problem", cause="log_damaged", reason=reason)
        holders, timeline = self._inventory.holders, self._inventory.timeline
        self._replace(timeline=newest_timeline(holders, timeline, view.table))
        steps = {item.step: item for item in view.steps}
        step = self._requested_step
        if step is not None and (stored_step := view.of(step)) is not None:
            steps[step] = stored_step
        self._view, self._stored = view, steps
        self._greatest = max(self._greatest, view.greatest)
        # RAM may have a copy of a step of plain Orbax, made from these files or from former ones.
        unsure = [
            steps[save.step]
            for save in sorted(self._saves_in_ram)
            if save.step in steps and (not steps[save.step].is_seen or is_plain(save.incarnation))
        ]
        if unsure:
            self._inspect(tier, view, unsure, deadline_s)

    def _inspect(
        self,
        tier: PersistentTier,
        view: StoredView,
        items: Sequence[PersistentStep],
        deadline_s: float,
    ) -> None:
        """Replace ``items`` by the contents of their files, and drop items that are no steps."""
        junk: list[PersistentStep] = []
        answers = tier.found.inspect_each(view, items, deadline_s)
        for item, inspected in zip(items, answers, strict=True):
            if isinstance(inspected, CheckpointError):
                raise inspected
            if inspected is None or inspected.is_junk:
                self._stored.pop(item.step, None)
                hidden = view.hidden(item.step) if item.step == self._requested_step else None
                if hidden is not None:
                    self._stored[item.step] = hidden
            else:
                self._stored[item.step] = self._as_held(inspected.step)
            if inspected is not None and inspected.is_junk:
                text = f"{inspected.folder} in storage is passed over: {inspected.step.problem}"
                self._events.emit("restore.note", text=text)
                junk.append(inspected.step)
        if junk and not self._stored:
            last = max(junk)
            self._stored[last.step] = last  # there is no other step, yet this is no fresh start
        is_marked = any(item.incarnation for item in self._stored.values())
        if view.table is None and is_marked and not self._has_reported_loss:
            self._has_reported_loss = True
            reason = "the step log is gone: steps in storage count by their markers"
            self._events.emit("persistent.problem", cause="log_missing", reason=reason)

    def _as_held(self, step: PersistentStep) -> PersistentStep:
        """Return a step of plain Orbax under the name that a copy in RAM of its files has."""
        for holder in self._inventory.holders:
            for copy in holder.tensors:
                if copy.save.step == step.step and is_same_save(
                    copy.save.incarnation, step.incarnation
                ):
                    return msgspec.structs.replace(step, incarnation=copy.save.incarnation)
        return step

    def _plan_stored(self, answer: RestorePlan, tier: PersistentTier) -> LoadPlan | NoPlan | None:
        """Return the plan to load the chosen step; None to choose again, after news of storage.

        PersistentTierError when storage does not answer, or refuses: the step may well be usable,
        so an older step must not replace it. CorruptData when the step cannot be used.
        """
        item, view = self._stored[answer.step], self._view
        assert view is not None, "the step was chosen from the view"
        if not item.is_seen:
            newest_first = sorted(self._stored.values(), reverse=True)
            unseen = [x for x in newest_first if not x.is_seen and x.step <= item.step]
            self._inspect(tier, view, unseen[: self._inspected_at_once], self._deadline_s)
            self._inspected_at_once = min(2 * self._inspected_at_once, _MOST_INSPECTED)
            return None
        inspected = tier.found.inspect(view, item, self._deadline_s)
        if inspected is not None and inspected.step.is_foreign:
            self._stored[item.step] = inspected.step
            return None
        if inspected is None or inspected.step.problem:
            # The job that saves there may have removed the step, and saved a newer step.
            if self._has_news(tier):
                return None
            raise CorruptData(
                "restore",
                f"step {item.step}",
                inspected.step.problem if inspected else "it is gone",
            )
        if inspected.step.tensors_of and self._wants_host_state:
            # This package wrote the step, which lacks its host states and their marker: such a step
            # does not count for a restore that wants host states.
            logging.warning("step %d in %s: %s", item.step, tier.directory, _LOST_MARKER)
            self._stored[item.step] = msgspec.structs.replace(item, problem=_LOST_MARKER)
            return None
        if inspected.step.incarnation != item.incarnation:
            self._stored[item.step] = inspected.step
            return None
        try:
            return self._plan_load(answer, tier, inspected)
        except (PersistentTierError, CorruptData) as error:
            if not error.retryable:
                unreadable = persistent_unreadable(answer.step)
                self._replace(quarantined=self._inventory.quarantined | {unreadable})
            raise

    def _plan_load(
        self, plan: RestorePlan, persistent: PersistentTier, inspected: FoundStep
    ) -> LoadPlan | NoPlan:
        """Return the plan to load a persistent step, or the reason why it must not be restored."""
        now_s = time.monotonic()
        # Storage gives one answer, however many arrays there are.
        limit_s = min((self._end_s - now_s) / 3, _DESCRIBED_IN_STALLS * self._limits.stall_s)
        stored = persistent.describe(inspected, now_s + limit_s)
        if stored.marker is not None and not all(stored.marker.empty):
            self._warn_left_out(plan.step)
        arrays, mismatches = match_leaves(
            self._leaves, stored.leaves, stored.marker and stored.marker.leaves
        )
        if mismatches:
            return NoPlan("state_mismatch", step=plan.step, mismatches=mismatches)
        if stored.marker is None and self._wants_host_state:
            return NoPlan("no_host_state", step=plan.step)
        return plan_load(
            plan,
            stored,
            arrays,
            self._targets,
            self._leaves,
            self._job.config.run_name,
            wants_host_state=self._wants_host_state,
        )

    def _has_news(self, tier: PersistentTier) -> bool:
        """Read the log again if it has a newer version; return whether it has."""
        view = self._view
        if view is None or self._requested_step is not None:
            return False
        if tier.found.log.is_newest(view.log.number, self._deadline_s):
            return False
        self._take_view(tier, self._deadline_s)
        return True

    def _warn_left_out(self, step: int) -> None:
        """Warn once that ``step`` has a host state, where no process wants a host state.

        A user who has asked for tensors only gets no warning.
        """
        if self._wants_host_state or self._leaves_out:
            return
        self._leaves_out = True
        self._events.emit("warning", cause="restore_without_host_state", step=step)
