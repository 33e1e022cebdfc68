"""Saves of one process, step by step: the file of ``save`` to read first. No storage, no RPC here.

In the training thread, by ``Saver.save``:

1. ``DueSaves.take``: in which tiers a save is due at this step, and ``PreemptionWatch.reached``.
   When nothing is due it returns: no flattening, no call.
2. ``SavedSteps.identity`` names the save, and a ``SaveRequest`` holds what the caller gave.
   ``_settle_past`` says what counts beside it: before an incarnation's first, or after a restore.
3. For each tier, the local one first (``_begin``): ``_wait_turn`` waits for the tier's save before.
   Where that takes too long this save is left out: one to RAM by the leader, for all (``Turns``).
4. ``SaveWork.take`` captures the host state and takes a ``Snapshot`` of the shards that
   ``ProcessPlacement`` gives this process, and returns the work that is left.
5. ``Snapshot.start`` starts what may be in flight; ``TierSchedule.start`` hands the
   work to the tier's thread.
6. When the saves of all tiers have begun, ``_wait_captured`` waits until the state may be donated.

In the thread of each tier:

7. ``StorageCapture.read`` reads first what storage needs, so that training waits for no other
   process.
8. Local: ``LocalSaves.run`` copies the shards with their CRC32C into a free slot, publishes the
   manifest and the host state, pushes that to the buddies, and votes (``Vote.cast``).
9. Persistent: ``PersistentSaves.run`` writes with the other writers, in rounds, from the slot of
   step 8 (``SlotCapture``) or the scratch area, and learns the outcome that the first writer sets,
   with the steps that storage keeps; ``Preservation`` then removes the others.

The state passes through three kinds: ``SaveRequest``, the caller's arrays by reference;
``Snapshot``, shards on their way off the devices; ``HostShard``, bytes with their CRC32C, kept
until storage has them. ``SlotCapture`` and ``StorageCapture`` are the two readers of a snapshot.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from absl import logging

from emergency_ckpt.background import chain, closing
from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.cluster.round import leave_together
from emergency_ckpt.core.save.last_step import unstored_text
from emergency_ckpt.core.save.save_rules import (
    check_items,
    named_metrics,
    skip_reason,
    too_often_text,
)
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.errors import (
    CheckpointError,
    DeadlineExceeded,
    InvalidState,
    PeerLeft,
    SaveFailed,
)
from emergency_ckpt.save.last_step import LastStep
from emergency_ckpt.save.overdue_notice import OverdueNotice
from emergency_ckpt.save.save_work import (
    SavedSteps,
    SaveRequest,
    SaverParts,
    SaveWork,
    was_donated,
)
from emergency_ckpt.save.schedule import DueSaves, TierSchedule
from emergency_ckpt.state.staging import Snapshot
from emergency_ckpt.state.tree import PyTree
from emergency_ckpt.storage.calls import release_workers
from emergency_ckpt.types import LOCAL, PERSISTENT, OrbaxStep, SaveId, TierName

_STOP_TIMEOUT_S = 30.0
_END_S = 30.0
"""Longest wait for the leader to announce no more steps: all processes of a job end together."""
_INSPECTION_S = 1.0
"""Pause between looks at the other processes, while a save waits for the one before it."""


class _Begun(NamedTuple):
    """A save that has begun in one tier; see ``save.captured`` for the times.

    ``taken_s``: the part of ``snapshot.ready_s`` that was over when it had begun.
    """

    tier: TierName
    snapshot: Snapshot
    begun_s: float
    waited_s: float
    taken_s: float


class Saver:
    """Saves to both tiers. For the training thread.

    Attributes:
      work: places states on processes, also those of a restore.
    """

    def __init__(self, parts: SaverParts, incarnation: str) -> None:
        self._parts = parts
        self._schedules: dict[TierName, TierSchedule] = {
            name: TierSchedule(name, plan, parts.failures)
            for name, plan in parts.config.save_plans().items()
        }
        self._saved = SavedSteps(parts.saves, incarnation, parts.config.run_name)
        self.work = SaveWork(parts, self._schedules, self._saved)
        self._newest_due = -1
        self._ignored = Repeats()
        self._too_often = Repeats()
        self._left = self._heard_at_end = False
        self._begun: dict[TierName, SaveId] = {}
        self._goes_on_from: SaveId | None = None
        self._last_step: int | None = None
        self._last_request: SaveRequest | None = None
        self._has_told_lost = False
        self._newest: LastStep | None = None
        if parts.persistent is not None and PERSISTENT in self._schedules:
            schedule = self._schedules[PERSISTENT]
            self._newest = LastStep(parts, parts.persistent, schedule, self._saved)
        self._entry = threading.Lock()  # of ``save``, against what begins in another thread
        self._is_restoring = False
        self._overdue = OverdueNotice(
            parts.watch,
            parts.config.preemption_grace_s,
            self._bring_newest,
            self._tell_missed,
            self._newest_steps,
            has_storage=self._newest is not None,
        )
        self._is_storage_prepared = PERSISTENT not in self._schedules
        self._due = DueSaves(
            self._schedules,
            parts.coordinator,
            parts.failures,
            self._note_missed,
            timeout_s=parts.config.save_timeout_s,
        )

    def save(
        self,
        step: int,
        state: PyTree,
        host_state: object,
        *,
        force: bool = False,
        metrics: Mapping[str, Any] | None = None,
        orbax: OrbaxStep | None = None,
    ) -> bool:
        """As ``EmergencyCheckpointer.save``."""
        with self._entry:
            begun = self._save(step, state, host_state, force=force, metrics=metrics, orbax=orbax)
            if not self._is_storage_prepared:
                self._prepare_storage()
            return begun

    def _save(
        self,
        step: int,
        state: PyTree,
        host_state: object,
        *,
        force: bool,
        metrics: Mapping[str, Any] | None,
        orbax: OrbaxStep | None,
    ) -> bool:
        self._last_step = step
        is_older = step < self._newest_due
        if force and is_older:
            raise self._not_newer(step)
        reached = self._parts.watch.reached(step)
        due = self._due.take(step, force=force, preempted=reached)
        preempted = reached and self._parts.watch.sync_step == step
        if preempted and is_older:
            return self._save_preempted(step, None)
        saves_last = self._parts.config.save_on_stop
        if not due and not preempted and (step <= self._newest_due or not saves_last):
            if is_older:
                self._note_ignored(step)
            return False
        plain = None if metrics is None else named_metrics(metrics)
        forced = force or preempted
        save = self._saved.identity(step, forced=forced)
        orbax = orbax or OrbaxStep(metrics=plain)
        orbax = msgspec.structs.replace(orbax, step_name=self._parts.config.step_name)
        check_items(orbax, state)
        request = SaveRequest(save, state, host_state, plain, time.monotonic(), forced, orbax)
        if saves_last:
            self._last_request = request.held()
        if not due and not preempted:
            return False
        if preempted:
            return self._save_preempted(step, request)
        self._settle_past(save, due)
        begun = self._begin_all(due, request)
        if begun and not self._parts.config.async_save:
            self.wait_until_finished()
        return begun

    def _note_ignored(self, step: int) -> None:
        """Say it now and then: a loop whose steps lie behind the newest saves nothing."""
        before = self._ignored.occurred("", time.monotonic())
        if before is not None:
            newest = self._newest_due
            self._parts.events.emit("save.skipped", step=step, cause="older", newest=newest)

    def _not_newer(self, step: int) -> InvalidState:
        problem = f"step {self._newest_due}, which was saved or restored, is newer"
        hint = "let the loop begin after the restored step, or restore an older one by its number"
        return InvalidState("save", f"step {step}", problem, hint=hint)

    def _settle_past(self, save: SaveId, saves_to: Collection[TierName]) -> None:
        """Decide what counts beside ``save``, before an incarnation's first or after a restore.

        Steps that are newer than a requested one are forgotten now: in RAM at once, in storage in
        the background, by the save to storage where that is one of ``saves_to``.
        """
        parts = self._parts
        if self._goes_on_from is not None:
            parts.timelines.bind()
            self._saved.forget_newer(self._goes_on_from.step)
            self._goes_on_from = None
            if parts.persistent is not None and parts.process[0] == 0:
                schedule = self._schedules.get(PERSISTENT)
                if schedule is not None and PERSISTENT not in saves_to:
                    schedule.worker.submit_next(partial(parts.persistent.roll_back, save))
        parts.timelines.begin_unrestored(save)

    def _prepare_storage(self) -> None:
        """Prepare this process's first save to storage in the background, where it writes there.

        Not before the loop asks about a step: a restart would reach its first step later, data
        workers are forked until then, and a short program would wait for the end of the imports.
        """
        persistent, placement = self._parts.persistent, self.work.placement
        me = self._parts.process[0]
        if persistent is None or (placement is None and me != 0):
            return  # no state has come yet that says who writes, besides process 0
        self._is_storage_prepared = True
        writes = placement is None or me in placement.writers
        if writes and PERSISTENT not in self._begun:
            persistent.prepare()

    def _begin_all(self, due: Sequence[TierName], request: SaveRequest) -> bool:
        """Begin a save in each tier that is due, then wait until the state may be donated."""
        request.both = len(due) > 1
        begun: list[_Begun] = []
        try:
            for name in due:
                begun += self._begin(name, request)
        finally:
            request.release()
            for each in begun:
                self._wait_captured(each, request, begun)
        return bool(begun)

    def _begin(self, name: TierName, request: SaveRequest) -> list[_Begun]:
        """Begin a save; return none where the tier has the step, or is busy."""
        schedule, save, begun_s = self._schedules[name], request.save, time.monotonic()
        if request.must_exist and request.step in self._saved.of(name):
            return []
        is_again = schedule.last_started == request.step
        schedule.note_due(request.step)
        self._newest_due = max(self._newest_due, request.step)
        if not self._wait_turn(schedule, request, is_again=is_again):
            return []
        waited_s = time.monotonic() - begun_s
        if request.must_exist and request.step in self._saved.of(name):
            return []  # it was the save that has just ended
        if schedule.pauses and not request.must_exist and self._tell_pause(schedule, save):
            return []
        snapshot, read, work, held = self.work.take(name, request)
        snapshot.start()
        if read is not None:
            work = chain(read, work)
        self._parts.events.emit("save.started", step=request.step, tier=name)
        if name == LOCAL:
            self._parts.local.turns.begin()
        schedule.start(closing(held, work))
        self._begun[name] = save
        return [_Begun(name, snapshot, begun_s, waited_s, snapshot.ready_s)]

    def _wait_turn(self, schedule: TierSchedule, request: SaveRequest, *, is_again: bool) -> bool:
        """Wait for the save before; a ``request`` that it leaves no time for is left out."""
        name, save = schedule.name, request.save
        limit_s = self._longest_wait_s(name, request)
        try:
            if name == LOCAL:
                is_idle = self._wait_for_ram(schedule, request, limit_s)
            else:
                is_idle = self._wait_idle(schedule, limit_s, each_time=request.must_exist)
        except PeerLeft as error:
            target = f"step {save.step} to the {name} tier"
            failure = SaveFailed("save", target, error.problem, hint=error.hint)
            failure.__cause__ = error
            self._leave_out(schedule, request, failure)
            return False
        if is_idle:
            return True
        if is_again:  # what is under way is a save of this very step: nothing is missed yet
            self._leave_out(schedule, request, None)
        elif name == PERSISTENT or request.must_exist:
            self._leave_out(schedule, request, self._missed(name, save, limit_s))
        else:
            self._leave_out(schedule, request, None)
            self._say_too_often(schedule, save)
        return False

    def _leave_out(
        self, schedule: TierSchedule, request: SaveRequest, why: SaveFailed | None
    ) -> None:
        """Leave a save out on this process, which tells the others in the background.

        ``why``: recorded, where something is missed that the user asked for.
        """
        parts, save = self._parts, request.save
        schedule.note_left_out(save.step)
        if schedule.name == PERSISTENT or not parts.local.turns.is_left_out(save):
            parts.saves[schedule.name].note_skipped(save)
        if why is not None:
            is_lost = request.must_exist and schedule.name == PERSISTENT
            parts.failures.record(why, lost_step=save.step if is_lost else None)
            self._tell_busy(schedule, save, why.problem)

    def _tell_busy(self, schedule: TierSchedule, save: SaveId, reason: str) -> None:
        self._parts.events.emit(
            "save.skipped", step=save.step, tier=schedule.name, cause="busy", reason=reason
        )

    def _wait_for_ram(self, schedule: TierSchedule, request: SaveRequest, limit_s: float) -> bool:
        """Wait for the save to RAM before; return whether this one may begin. As ``_wait_idle``."""
        turns, save, now_s = self._parts.local.turns, request.save, time.monotonic()
        deadline_s = now_s + limit_s
        early_s = deadline_s if request.must_exist else now_s + turns.limit_s(limit_s)
        while True:
            left_s = (early_s if now_s < early_s else deadline_s) - now_s
            if schedule.wait_idle(min(_INSPECTION_S, left_s), each_time=True):
                return not turns.is_left_out(save)
            now_s = time.monotonic()
            if (now_s >= early_s and turns.leave_out(save)) or now_s >= deadline_s:
                return False
            self._parts.inspect()

    def _say_too_often(self, schedule: TierSchedule, save: SaveId) -> None:
        """Say it now and then, at the leader: the others leave out what that one does."""
        text = too_often_text(save.step, schedule.last_started, *schedule.pace)
        self._tell_busy(schedule, save, text)
        if self._parts.process[0] == 0:
            before = self._too_often.occurred("", time.monotonic())
            if before is not None:
                logging.warning("%s", text)

    def _longest_wait_s(self, name: TierName, request: SaveRequest) -> float:
        """Return the longest wait for the save before."""
        config = self._parts.config
        if request.limit_s is not None:
            return request.limit_s
        if name == LOCAL:
            return config.save_timeout_s
        # A slow bucket must not hold up training, nor with it the others' local saves. It is left
        # out and not made up for at a later step, which the leader would have to announce.
        least_s = config.save_timeout_s if request.must_exist else 0.0
        return max(least_s, config.storage_wait_timeout_s)

    def _missed(self, name: TierName, save: SaveId, limit_s: float) -> SaveFailed:
        waits = self._parts.saves[name].waits_for_others
        problem, hint = skip_reason(name, limit_s, waits_for_others=waits)
        return SaveFailed("save", f"step {save.step} to the {name} tier", problem, hint=hint)

    def _wait_idle(self, schedule: TierSchedule, limit_s: float, *, each_time: bool) -> bool:
        """Wait for the save before. PeerLeft: a process that takes part in it has died."""
        if not each_time:  # it waits for storage, if at all
            return schedule.wait_idle(limit_s, each_time=False)
        deadline_s = time.monotonic() + limit_s
        is_idle = schedule.wait_idle(min(limit_s, _INSPECTION_S), each_time=True)
        while not is_idle and time.monotonic() < deadline_s:
            self._parts.inspect()
            left_s = deadline_s - time.monotonic()
            is_idle = schedule.wait_idle(max(0.0, min(left_s, _INSPECTION_S)), each_time=True)
        return is_idle

    def _wait_captured(
        self, begun: _Begun, request: SaveRequest, together: Sequence[_Begun]
    ) -> None:
        """Wait until the state may be donated, as far as this save is concerned.

        The training thread would have waited for arrays still being computed without a save, too:
        that is no stall. ``together``: the saves of this step.
        """
        try:
            limit_s = self._parts.config.save_timeout_s
            if request.limit_s is not None:  # what is left of a grace period, or of a last wait
                limit_s = min(limit_s, request.limit_s)
            captured = begun.snapshot.wait_captured(limit_s, self._parts.inspect)
        except PeerLeft:
            begun.snapshot.close()
            raise
        if not captured:
            begun.snapshot.close()  # fails the save; training goes on
        now_s = time.monotonic()
        ready_s = sum(each.snapshot.ready_s for each in together)
        # Of a save that began before this one, some was before ``begun.begun_s``.
        earlier_s = sum(each.taken_s for each in together if each.begun_s < begun.begun_s)
        self._schedules[begun.tier].note_started(request.step, now_s - request.begun_s - ready_s)
        spent = {
            "seconds": now_s - begun.begun_s - (ready_s - earlier_s),
            "waited_seconds": begun.waited_s,
            "ready_seconds": ready_s - earlier_s,
        }
        self._parts.events.emit("save.captured", step=request.step, tier=begun.tier, **spent)

    def _tell_pause(self, schedule: TierSchedule, save: SaveId) -> bool:
        """Leave ``save`` out everywhere, after those that have failed: at the first writer only."""
        persistent, placement = self._parts.persistent, self.work.placement
        if persistent is None or placement is None:
            return False
        schedule.start(lambda: persistent.tell_pause(save, placement.writers))
        return True

    def _note_missed(self, name: TierName, step: int) -> None:
        """Tell the others that this process learned too late of the save of ``step``.

        In the thread of the announcements. The other processes wait for this one's part.
        """
        parts, schedule, placement = self._parts, self._schedules[name], self.work.placement
        if not schedule.is_behind(step):
            return  # a save of the step, or a later one, has begun here, as the others know
        schedule.note_due(step)
        parts.events.emit("save.skipped", step=step, tier=name, cause="late")
        save = self._saved.identity(step, forced=False)
        if name == LOCAL:
            parts.local.tell_late(save)
        elif parts.persistent is not None:
            parts.persistent.tell_late(save, () if placement is None else placement.writers)

    def should_save(self, step: int) -> bool:
        """As ``EmergencyCheckpointer.should_save``."""
        if not self._is_storage_prepared:
            self._prepare_storage()
        reached = self._parts.watch.reached(step)
        return self._due.inspect(step, preempted=reached) or self._parts.watch.sync_step == step

    # Around a restore.

    def begin_restore(self) -> None:
        """Announce no more steps, before a restore. Collective, with ``end_restore``."""
        with self._entry:
            self._is_restoring = True
        self._due.stop(_END_S)
        for schedule in self._schedules.values():  # of a save that began in another thread
            schedule.worker.wait_idle(self._parts.config.longest_wait_s)
        self._last_request = self._last_step = None

    def end_restore(self) -> None:
        """Announce steps again, after a restore that succeeded or failed."""
        self._is_restoring = False
        self._due.start_again()

    def expect_steps_after(self, step: int) -> None:
        """After a restore of ``step``, -1 for none: announce the steps that come first."""
        self._due.expect(step)

    def continue_from(
        self, save: SaveId, incarnation: str, tier: TierName, *, leaves_newer: bool = False
    ) -> None:
        """Continue from ``save``, restored from ``tier``, and save under ``incarnation``.

        ``leaves_newer``: newer steps still count; the next save forgets them.
        """
        if not leaves_newer:
            self._saved.forget_newer(save.step)
        self._saved.start_from(save, incarnation, tier)
        self._parts.local.restart_from(save)
        self._parts.failures.note_restored(save.step)
        self._goes_on_from = save if leaves_newer else None
        self._newest_due = save.step
        for schedule in self._schedules.values():
            schedule.restart_from(save.step)

    def go_on_after(self, found: Mapping[TierName, Sequence[int]]) -> None:
        """Take ``found`` for the steps of the tiers: no step up to the newest of each is due.

        But where an older one was restored: then newer ones are due again.
        """
        self._saved.note_found(found)
        if self._goes_on_from is not None:
            return
        self._parts.timelines.note_continuation()
        newest = {name: steps[-1] for name, steps in found.items() if steps}
        self._newest_due = max(newest.values(), default=-1)
        for name, schedule in self._schedules.items():
            if name in newest:
                schedule.restart_from(newest[name])

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers: it may be saved again."""
        self._saved.forget(step)
        self._parts.local.forget(step)
        for schedule in self._schedules.values():
            schedule.forget(step)

    @property
    def saved(self) -> SavedSteps:
        """Return the steps that this process knows to be complete."""
        return self._saved

    # Preemption.

    def reached_preemption(self, step: int) -> bool:
        """As ``EmergencyCheckpointer.reached_preemption``."""
        return self._parts.watch.reached(step)

    def _save_preempted(self, step: int, request: SaveRequest | None) -> bool:
        """Save in all tiers, whatever the policies say: first to RAM, which is quick.

        ``request``: None where ``step`` is older than the newest. Nothing is saved or hidden then.
        """
        parts, watch = self._parts, self._parts.watch
        parts.events.emit("preemption.reached", step=step, grace_s=watch.grace_left_s())
        tiers: list[TierName] = [
            name
            for name, schedule in self._schedules.items()
            if parts.config.save_on_preemption or schedule.plan.on_preemption
        ]
        started = set[TierName]()
        why = f"since step {self._newest_due}, which was saved or restored, is newer"
        if request is not None:
            why = "the time is over"
            self._settle_past(request.save, self._schedules)
            started = self._start_in_order(tiers, request, watch.grace_left_s)
        for name in tiers:
            # A step of this number that is older than the newest is not this one.
            is_there = request is not None and step in self._saved.of(name)
            if name not in started and not is_there:
                self._say_not_written(name, step, why)
        if parts.config.exit_on_preemption:
            self._exit(step)
        return bool(started)

    def _start_in_order(
        self, tiers: Iterable[TierName], request: SaveRequest, left_s: Callable[[], float]
    ) -> set[TierName]:
        """Save in ``tiers``, the first to its end before the next begins; where a save started."""
        started: set[TierName] = set()
        names = list(tiers)
        request.both = len(names) > 1
        try:
            for name in names:
                request.limit_s = left_s()
                for begun in self._begin(name, request):
                    self._wait_captured(begun, request, [begun])
                    started.add(name)
                    if name == LOCAL:  # a process that is gone may hold it up: storage has a half
                        self._schedules[name].worker.wait_idle(left_s() / 2)
        finally:
            request.release()
        return started

    def _exit(self, step: int) -> None:
        try:
            self.wait_until_finished()
        except CheckpointError as error:
            logging.error("preempted at step %d: %s", step, error)
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def _say_not_written(self, name: TierName, step: int, why: str) -> None:
        self._parts.events.emit("preemption.missed", cause="not_written", step=step, tier=name)
        logging.error("preempted: step %d is not in the %s tier, %s", step, name, why)

    @property
    def begun(self) -> Mapping[TierName, SaveId]:
        """The newest save that this process has begun in each tier."""
        return dict(self._begun)

    # A notice that the loop does not come to act on; in the thread of ``OverdueNotice``.

    def _bring_newest(self, deadline_s: float) -> None:
        """Begin to bring RAM's newest step to storage, with the others, unless ``save`` runs."""
        newest, placement, watch = self._newest, self.work.placement, self._parts.watch
        if newest is None or placement is None or not self._parts.config.save_on_preemption:
            return

        def inspect() -> None:
            if self._overdue.is_closing or self._is_restoring or watch.sync_step is not None:
                raise CheckpointError("wait for", "the decision of process 0", "the loop goes on")

        decision = newest.agree(placement, deadline_s, inspect, goes_on=True)
        if decision is None or not self._entry.acquire(blocking=False):
            return
        try:
            is_idle = all(schedule.worker.wait_idle(0) for schedule in self._schedules.values())
            if is_idle and not self._is_restoring and watch.sync_step is None:
                newest.begin(decision, placement)
        finally:
            self._entry.release()

    def _newest_steps(self) -> tuple[int | None, int | None]:
        """Return the newest steps in RAM and in storage, as far as this process knows."""
        stored = list(self._saved.of(PERSISTENT))
        listed = None if self._newest is None else self._newest.listed()
        stored += [] if listed is None else [listed]
        return max(self._saved.of(LOCAL), default=None), max(stored, default=None)

    def _tell_missed(self, text: str) -> None:
        logging.error("%s", text)
        # An observer of this event may end the process.
        self._parts.events.emit("preemption.missed", cause="no_save", text=text)

    # Waiting and ending.

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """As ``EmergencyCheckpointer.wait_until_finished``."""
        sync_step, deadline_s = self._parts.watch.sync_step, self._deadline_s(timeout_s)
        for name, schedule in self._schedules.items():
            if not schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic())):
                if sync_step is not None:
                    self._say_not_written(name, sync_step, "the time is over")
                raise DeadlineExceeded(
                    "wait for", f"the save to the {name} tier", "it has not ended in time"
                )
        preservation = self._parts.preservation
        left_s = max(0.0, deadline_s - time.monotonic())
        if preservation is not None and not preservation.wait_idle(left_s):
            raise DeadlineExceeded("wait for", "the removal of old steps", "not done in time")
        if sync_step is not None and not self._left:
            self._left = True
            leave_together(self._parts.coordinator, max(1.0, self._parts.watch.grace_left_s()))

    def _deadline_s(self, timeout_s: float | None) -> float:
        """The longest that saves may take, or ``timeout_s``; the grace period after a notice."""
        config, watch = self._parts.config, self._parts.watch
        limit_s = config.longest_wait_s if timeout_s is None else timeout_s
        if watch.sync_step is not None:
            limit_s = min(limit_s, watch.grace_left_s())
        return time.monotonic() + limit_s

    def save_last(self, timeout_s: float | None = None) -> None:
        """At the end of training: heed a notice that has come since the last step, and save that.

        It is saved with ``save_on_stop`` alone, notice or not: each process looks once a second for
        the notices of others, so nobody here may know of one within the last second. Collective in
        effect: all processes hold the same step.
        """
        self._due.stop(min(_END_S, self._deadline_s(timeout_s) - time.monotonic()))
        watch = self._parts.watch
        self._heard_at_end = watch.reached_at_end()
        if self._heard_at_end:
            left_s = watch.grace_left_s()
            self._parts.events.emit("preemption.reached", step=watch.sync_step, grace_s=left_s)
        request, self._last_request = self._last_request, None
        if request is not None and was_donated(request.state):
            self._has_told_lost = True
            self._parts.events.emit(
                "stop.not_saved", step=request.step, text="its arrays were donated or deleted since"
            )
        elif request is not None:
            save = self._saved.identity(request.step, forced=True)
            self._settle_past(save, self._schedules)
            request = dataclasses.replace(request, save=save, must_exist=True)
            request.begun_s = time.monotonic()
            deadline_s = self._deadline_s(timeout_s)
            self._start_in_order(
                self._schedules, request, lambda: max(0.0, deadline_s - time.monotonic())
            )

    def store_newest(self, timeout_s: float | None = None) -> None:
        """At a normal end, begin to bring RAM's newest step to storage, where storage lacks it.

        All that end well call it, once. Blocks for saves in progress and for the leader. A run that
        has only read changes nothing.
        """
        self._overdue.close()
        newest = self._newest
        if newest is None or self._last_step is None:
            return
        if self._goes_on_from is not None:
            newest.reason = "nothing was saved since an older step was restored by its number"
            return
        deadline_s = self._deadline_s(timeout_s)
        is_idle = all(
            schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic()))
            for schedule in self._schedules.values()
        )
        placement = self.work.placement if is_idle else None
        decision = newest.agree(placement, deadline_s, self._parts.inspect)
        if decision is not None and decision.stored is not None and placement is not None:
            self._settle_past(decision.stored, {PERSISTENT})
            newest.begin(decision, placement)

    def tell_unstored(self) -> None:
        """After a normal end, warn where storage lacks the last step: RAM goes with its hosts."""
        persistent, newest = self._parts.persistent, self._newest
        if persistent is None or newest is None or self._parts.process[0] != 0:
            return
        in_ram = max(self._saved.of(LOCAL), default=None)
        text = unstored_text(self._last_step, persistent.newest_listed(), in_ram, newest.reason)
        if text and not self._has_told_lost:
            self._parts.events.emit("stop.not_saved", step=self._last_step, text=text)

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, after a notice not beyond its grace; then end all threads."""
        try:
            self.wait_until_finished(timeout_s)
            step = self._parts.watch.sync_step
            if self._heard_at_end and step is not None:
                why = f"the newest that is saved is {self._saved.newest()}; see save_on_stop"
                for name in self._schedules:
                    if step not in self._saved.of(name):
                        self._say_not_written(name, step, why)
        finally:
            self.end_threads(_STOP_TIMEOUT_S)

    def abandon(self, timeout_s: float) -> None:
        """Wait so long for saves in progress, then end what threads it can; never raise."""
        self._overdue.close(is_bad_end=True)
        deadline_s = time.monotonic() + timeout_s
        try:
            self.wait_until_finished(timeout_s)
        except CheckpointError as error:
            logging.error("saves in progress are cancelled: %s", error)
        self.end_threads(max(1.0, (deadline_s - time.monotonic()) / 3))

    def end_threads(self, timeout_s: float) -> None:
        """End each thread, after what it is at, if that takes no longer than ``timeout_s``."""
        self._overdue.close()
        self._due.stop()
        if self._parts.persistent is not None:
            self._parts.persistent.end_waits()
        ended = [schedule.worker.stop(timeout_s) for schedule in self._schedules.values()]
        if self._parts.preservation is not None:
            ended.append(self._parts.preservation.stop(timeout_s))
        self.work.close()
        if not all(ended):
            # Storage may be silent for hours, and the interpreter's end would wait for its clients.
            release_workers()
