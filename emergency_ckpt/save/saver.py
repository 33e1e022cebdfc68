"""Saves of one process, step by step: the file of ``save`` to read first. No storage, no RPC here.

In the training thread, by ``Saver.save``:

1. ``PreemptionWatch.reached`` looks for a notice, and ``DueSaves.take`` returns the tiers in which
   a save is due at this step. When no save is due, ``save`` returns: no flattening, no call.
2. ``SavedSteps.identity`` names the save, and a ``SaveRequest`` has the caller's arguments.
   ``_settle_past`` decides at the first save after a start or a restore which earlier steps count.
3. For each tier, the local one first (``_begin``): ``TurnWait`` waits for the tier's previous save.
   If that takes too long, this save is left out. A save to RAM is left out by the leader, for all
   processes (``Turns``).
4. ``SaveWork.take`` captures the host state and takes a ``Snapshot`` of the shards that
   ``ProcessPlacement`` gives this process, and returns the work that is left.
5. ``Snapshot.start`` starts the copies off the devices, as many as may be in flight;
   ``TierSchedule.start`` gives the work to the tier's thread.
6. When the saves of all tiers have begun, ``_wait_captured`` waits until the state may be donated.

In the thread of each tier:

7. ``StorageCapture.read`` first reads the shards that storage needs, so that training waits for no
   other process.
8. Local: ``LocalSaves.run`` copies the shards with their CRC32C into a free slot, publishes the
   manifest and the host state, sends the host state to the buddies, and votes (``Vote.cast``).
9. Persistent: ``PersistentSaves.run`` writes with the other writers, in rounds, from the slot of
   step 8 (``SlotCapture``) or the scratch area. It waits for the outcome that the first writer
   sets, with the steps that storage keeps; ``Preservation`` then removes the other steps.

The state takes three forms: ``SaveRequest``, the caller's arrays by reference; ``Snapshot``, shards
on their way off the devices; ``HostShard``, bytes with their CRC32C, kept until storage has them.
``SlotCapture`` and ``StorageCapture`` are the two readers of a snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from absl import logging

from emergency_ckpt.background import closing
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.core.save.save_rules import check_items, named_metrics, plain_orbax
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.errors import (
    CheckpointError,
    InvalidState,
    PeerLeft,
    PersistentTierError,
)
from emergency_ckpt.save.announcements import DueSaves
from emergency_ckpt.save.ending import Ending, inside_save
from emergency_ckpt.save.local_save import SaveResult
from emergency_ckpt.save.save_work import SavedSteps, SaveRequest, SaveWork, TierSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.save.turn_wait import TurnWait
from emergency_ckpt.state.staging import Snapshot
from emergency_ckpt.state.tree import PyTree
from emergency_ckpt.types import LOCAL, PERSISTENT, OrbaxStep, SaveId, TierName


class _Begun(NamedTuple):
    """A save that has begun in one tier; see ``save.captured`` for the times.

    ``taken_s``: the part of ``snapshot.ready_s`` that was over when the save had begun.
    """

    tier: TierName
    snapshot: Snapshot
    begun_s: float
    waited_s: float
    taken_s: float


class Saver:
    """Saves to both tiers. For the training thread.

    Attributes:
      work: places the shards of states, also of a state to restore, and takes snapshots.
      saved: the steps that this process knows to be complete.
      ending: waits for the saves, and ends them.
      local_result: of the newest save to RAM that this process has begun.
    """

    def __init__(self, job: Job, saves: TierSaves, incarnation: str) -> None:
        self._job, self._saves = job, saves
        self._schedules: dict[TierName, TierSchedule] = {
            name: TierSchedule(name, plan, job.failures)
            for name, plan in job.config.save_plans().items()
        }
        self.saved = SavedSteps(saves.by_tier, incarnation, job.config.run_name)
        self.work = SaveWork(job, saves, self._schedules, self.saved)
        self._newest_due = -1
        self._ignored = Repeats()
        self._turn = TurnWait(job, saves, self._tell_skipped)
        self._begun: dict[TierName, SaveId] = {}
        self.local_result: SaveResult | None = None
        self._goes_on_from: SaveId | None = None
        self._to_roll_back: SaveId | None = None  # the save that binds storage, at process 0
        # Reentrant for signal handlers, which run inside the code that they interrupt.
        self._entry = threading.RLock()
        self._is_storage_prepared = PERSISTENT not in self._schedules
        self._due = DueSaves(
            self._schedules,
            job.coordinator,
            job.failures,
            self._note_missed,
            timeout_s=job.config.save_timeout_s,
        )
        self.ending = Ending(
            job, saves, self._schedules, self.saved, self.work, self._due, self._entry
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
        problem: InvalidState | None = None,
    ) -> bool:
        """As ``EmergencyCheckpointer.save``; with a ``problem``, as ``leave_out``, and raise it."""
        with self._entry:
            if self.ending.is_saving:
                raise inside_save("save", f"step {step}")
            self.ending.is_saving = True
            try:
                begun = self._save(
                    step,
                    state,
                    host_state,
                    force=force,
                    metrics=metrics,
                    orbax=orbax,
                    problem=problem,
                )
                if not self._is_storage_prepared:
                    self._prepare_storage()
                return begun
            finally:
                self.ending.is_saving = False

    def _save(
        self,
        step: int,
        state: PyTree,
        host_state: object,
        *,
        force: bool,
        metrics: Mapping[str, Any] | None,
        orbax: OrbaxStep | None,
        problem: InvalidState | None,
    ) -> bool:
        is_older = self._note_step(step)
        if force and is_older:
            raise self._not_newer(step)
        reached = self._job.watch.reached(step)
        due = self._due.take(step, force=force, preempted=reached)
        preempted = reached and self._job.watch.sync_step == step
        if preempted and is_older:
            return self._save_preempted(step, None)
        if not due and not preempted:
            if is_older:
                self._tell_older(step)
            return False
        json_metrics = None if metrics is None else named_metrics(metrics)
        forced = force or preempted
        save = self.saved.identity(step, forced=forced)
        orbax = plain_orbax(orbax or OrbaxStep(metrics=json_metrics))
        orbax = msgspec.structs.replace(orbax, step_name=self._job.config.orbax.step_name)
        check_items(orbax, state)
        now_s = time.monotonic()
        announced = frozenset[TierName]() if forced else self._due.announced
        request = SaveRequest(
            save,
            state,
            host_state,
            json_metrics,
            now_s,
            forced,
            orbax,
            announced=announced,
            problem=problem,
        )
        if preempted:
            return self._save_preempted(step, request)
        self._settle_past(save)
        begun = self._begin_all(due, request)
        if begun and not self._job.config.async_save:
            self.ending.wait_until_finished()
        return begun

    def _settle_past(self, save: SaveId) -> None:
        """Decide which earlier steps count from the first save after a start or a restore on.

        After a restore of a requested step, the newer steps are forgotten: in RAM now, in storage
        by the save to storage, or by ``_roll_storage_back``.
        """
        job = self._job
        if self._goes_on_from is not None:
            job.timelines.bind()
            self.saved.forget_newer(self._goes_on_from.step)
            self._goes_on_from = None
            if PERSISTENT in self._schedules and job.process[0] == 0:
                self._to_roll_back = save
        job.timelines.begin_unrestored(save)

    def _roll_storage_back(self, begun: Collection[TierName]) -> None:
        """Roll storage back in the background, where no save in ``begun`` does that.

        A save to storage may be due and not begin: the step is there, or the tier pauses.
        """
        save, self._to_roll_back = self._to_roll_back, None
        persistent = self._saves.persistent
        if save is not None and persistent is not None and PERSISTENT not in begun:
            worker = self._schedules[PERSISTENT].worker
            worker.submit_next(partial(persistent.roll_back, save))

    def _begin_all(self, due: Sequence[TierName], request: SaveRequest) -> bool:
        """Begin a save in each tier that is due, then wait until the state may be donated."""
        request.both = len(due) > 1
        begun: list[_Begun] = []
        reached: list[TierName] = []
        try:
            for name in due:
                reached.append(name)
                save_begun = self._begin(name, request)
                if save_begun is not None:
                    begun.append(save_begun)
        except CheckpointError as error:
            self._refuse([name for name in due if name not in reached], request.save, error)
            raise
        finally:
            request.release()
            self._roll_storage_back([save_begun.tier for save_begun in begun])
            for save_begun in begun:
                self._wait_captured(save_begun, request, begun)
        return bool(begun)

    def _refuse(self, tiers: Sequence[TierName], save: SaveId, error: CheckpointError) -> None:
        """Tell the others that a save that is due in ``tiers`` does not begin here."""
        for name in tiers:
            self._schedules[name].note_due(save.step)
            tell = partial(self._tell_refused, name, save, error)
            self._schedules[name].leave_out(save.step, tell)

    def _begin(self, name: TierName, request: SaveRequest) -> _Begun | None:
        """Begin a save; return None if the tier has the step, is busy, or pauses.

        The other processes learn of a save that an error ends here: the caller may go on.
        """
        schedule, save, begun_s = self._schedules[name], request.save, time.monotonic()
        if request.must_exist and request.step in self.saved.of(name):
            return None
        is_again = schedule.last_started == request.step
        schedule.note_due(request.step)
        self._newest_due = max(self._newest_due, request.step)
        if not self._turn.wait(schedule, request, is_again=is_again):
            return None
        waited_s = time.monotonic() - begun_s
        if request.must_exist and request.step in self.saved.of(name):
            return None  # the save that has just ended was of this step
        if schedule.pauses and not request.must_exist and self._tell_pause(schedule, save):
            return None
        try:
            snapshot, work, capture = self.work.take(name, request)
        except CheckpointError as error:
            schedule.start(partial(self._tell_refused, name, save, error))
            raise
        snapshot.start()
        self._job.events.emit("save.started", step=request.step, tier=name)
        if name == LOCAL:
            self._saves.local.turns.begin()
            self.local_result = request.result
        schedule.start(closing(capture, work))
        self._begun[name] = save
        return _Begun(name, snapshot, begun_s, waited_s, snapshot.ready_s)

    def _wait_captured(
        self, begun: _Begun, request: SaveRequest, together: Sequence[_Begun]
    ) -> None:
        """Wait until the state may be donated, as far as this save is concerned.

        Waiting for arrays that are still being computed is no stall: without a save, the training
        thread would wait for them too. ``together``: the saves of this step.
        """
        try:
            limit_s = self._job.config.save_timeout_s
            if request.limit_s is not None:  # what is left of a grace period, or of a last wait
                limit_s = min(limit_s, request.limit_s)
            captured = begun.snapshot.wait_captured(limit_s, self._job.inspect)
        except PeerLeft:
            begun.snapshot.close()
            raise
        if not captured:
            begun.snapshot.close()  # fails the save; training goes on
        now_s = time.monotonic()
        ready_s = sum(other.snapshot.ready_s for other in together)
        # An earlier save of this step spent some of that time before ``begun.begun_s``.
        earlier_s = sum(other.taken_s for other in together if other.begun_s < begun.begun_s)
        self._schedules[begun.tier].note_started(request.step, now_s - request.begun_s - ready_s)
        spent = {
            "seconds": now_s - begun.begun_s - (ready_s - earlier_s),
            "waited_seconds": begun.waited_s,
            "ready_seconds": ready_s - earlier_s,
        }
        self._job.events.emit("save.captured", step=request.step, tier=begun.tier, **spent)

    def _tell_pause(self, schedule: TierSchedule, save: SaveId) -> bool:
        """At the first writer: leave ``save`` out on all processes, since earlier saves failed."""
        persistent, placement = self._saves.persistent, self.work.placement
        if persistent is None or placement is None:
            return False
        schedule.start(lambda: persistent.tell_pause(save, placement.writers))
        return True

    def _note_missed(self, name: TierName, step: int) -> None:
        """Tell the others, which wait for this process, that it was late for the save of ``step``.

        In the thread of the announcements.
        """
        job, schedule = self._job, self._schedules[name]
        if not schedule.is_behind(step):
            return  # a save of this step or of a later step has begun here, as the others know
        schedule.note_due(step)
        job.events.emit("save.skipped", step=step, tier=name, cause="late")
        save = self.saved.identity(step, forced=False)
        if name == LOCAL:
            self._saves.local.tell_late(save)
        elif self._saves.persistent is not None:
            self._saves.persistent.tell_late(save, self._known_writers)

    def _tell_skipped(self, name: TierName, save: SaveId) -> None:
        """Tell the others, which wait for this process, that it leaves ``save`` out.

        In the thread of the tier's saves.
        """
        if name == LOCAL:
            self._saves.local.tell_skipped(save)
        elif self._saves.persistent is not None:
            self._saves.persistent.tell_skipped(save, self._known_writers)

    def _tell_refused(self, name: TierName, save: SaveId, error: CheckpointError) -> None:
        """Tell the others, which wait for this process, that ``error`` keeps it from ``save``.

        In the thread of the tier's saves.
        """
        reason = f"{type(error).__name__}: {error}"
        if name == LOCAL:
            self._saves.local.leave_out(save, reason)
        elif self._saves.persistent is not None:
            self._saves.persistent.leave_out(save, self._known_writers, reason)

    @property
    def _known_writers(self) -> Sequence[int]:
        """Return the writers of saves to storage; empty before a state was placed."""
        placement = self.work.placement
        return () if placement is None else placement.writers

    def _not_newer(self, step: int) -> InvalidState:
        problem = f"step {self._newest_due}, which was saved or restored, is newer"
        hint = "let the loop begin after the restored step, or restore an older one by its number"
        return InvalidState("save", f"step {step}", problem, hint=hint)

    def _prepare_storage(self) -> None:
        """Prepare a writer of storage, in the background, for its first save to storage.

        The preparation waits until the loop asks about a step. Begun earlier, it would delay the
        first step of a restart, run while data workers are forked, and hold up a short program's
        end until the imports are done.
        """
        persistent, placement = self._saves.persistent, self.work.placement
        me = self._job.process[0]
        if persistent is None or (placement is None and me != 0):
            return  # which processes write, besides process 0, depends on the first state
        self._is_storage_prepared = True
        writes = placement is None or me in placement.writers
        if writes and PERSISTENT not in self._begun:
            persistent.prepare()

    def should_save(self, step: int) -> bool:
        """As ``EmergencyCheckpointer.should_save``."""
        if not self._is_storage_prepared:
            self._prepare_storage()
        is_older = self._note_step(step)
        reached = self._job.watch.reached(step)
        due = self._due.inspect(step, preempted=reached) or self._job.watch.sync_step == step
        if is_older and not due:
            self._tell_older(step)
        return due

    def _note_step(self, step: int) -> bool:
        """Note the step of the loop; return whether it is older than the newest.

        Also of a loop that calls ``save`` only where ``should_save`` is True.
        """
        self.ending.last_step = step
        if self._job.watch.sync_step not in (None, step):
            self.ending.is_past_notice = True
        return step < self._newest_due

    def _tell_older(self, step: int) -> None:
        """Report now and then that nothing is saved at ``step``, which is older than the newest."""
        if self._ignored.occurred("", time.monotonic()) is not None:
            self._job.events.emit("save.skipped", step=step, cause="older", newest=self._newest_due)

    # Around a restore.

    @property
    def announcements(self) -> str:
        """The prefix of the keys that announce steps now, until a restore; empty without any."""
        return self._due.name

    def expect_steps_after(self, step: int) -> None:
        """Announce the step after the restored ``step`` (-1: none), before the loop reaches it."""
        self._due.expect(step)

    def continue_from(
        self, save: SaveId, incarnation: str, tier: TierName, *, leaves_newer: bool = False
    ) -> None:
        """Continue from ``save``, restored from ``tier``, and save under ``incarnation``.

        ``leaves_newer``: newer steps still count; the next save forgets them.
        """
        if not leaves_newer:
            self.saved.forget_newer(save.step)
        self.saved.start_from(save, incarnation, tier)
        self._saves.local.restart_from(save)
        self._job.failures.note_restored(save.step)
        self._goes_on_from = save if leaves_newer else None
        self._newest_due = save.step
        for schedule in self._schedules.values():
            schedule.restart_from(save.step)

    def go_on_after(self, steps_of: Mapping[TierName, Sequence[int]]) -> None:
        """Note the steps of the tiers: in each, no step up to the newest is due.

        The exception is a restored older step: then the newer steps are due again.
        """
        self.saved.note_found(steps_of)
        if self._goes_on_from is not None:
            return
        self._job.timelines.note_continuation()
        newest = {name: steps[-1] for name, steps in steps_of.items() if steps}
        self._newest_due = max(newest.values(), default=-1)
        for name, schedule in self._schedules.items():
            if name in newest:
                schedule.restart_from(newest[name])

    def forget(self, step: int) -> None:
        """Allow another save of ``step``, which was removed from both tiers."""
        self.saved.forget(step)
        self._saves.local.forget(step)
        if self._saves.persistent is not None:
            self._saves.persistent.forget(step)
        for schedule in self._schedules.values():
            schedule.forget(step)

    # Preemption.

    def _save_preempted(self, step: int, request: SaveRequest | None) -> bool:
        """Save in all tiers, whatever the policies say: first to RAM, which is quick.

        ``request``: None where ``step`` is older than the newest. Then nothing is saved or hidden.
        """
        job, watch = self._job, self._job.watch
        job.events.emit("preemption.reached", step=step, grace_s=watch.grace_left_s())
        tiers: list[TierName] = [
            name
            for name, schedule in self._schedules.items()
            if job.config.saves_at_preemption or schedule.plan.on_preemption
        ]
        started = set[TierName]()
        failure: CheckpointError | None = None
        why = f"since step {self._newest_due}, which was saved or restored, is newer"
        if request is not None:
            why = "the time is over"
            try:
                self._settle_past(request.save)
            except PersistentTierError as error:  # the job ends by the notice all the same
                why = str(error)
            else:
                try:
                    self._start_in_order(tiers, request, watch.grace_left_s, started)
                except PeerLeft:
                    raise
                except CheckpointError as error:
                    failure, why = error, str(error)
        for name in tiers:
            # Without a request, a saved step of this number is not the present state.
            is_there = request is not None and step in self.saved.of(name)
            if name not in started and not is_there:
                self.ending.say_not_written(name, step, why)
        if job.config.on_preemption == "exit":
            try:
                self.ending.wait_until_finished()
            except CheckpointError as error:
                logging.error("preempted at step %d: %s", step, error)
            if failure is not None:
                logging.error("preempted at step %d: %s", step, failure)
            raise SystemExit(PREEMPTED_EXIT_CODE)
        if failure is not None:
            raise failure
        return bool(started)

    def _start_in_order(
        self,
        tiers: Sequence[TierName],
        request: SaveRequest,
        left_s: Callable[[], float],
        started: set[TierName],
    ) -> None:
        """Save in ``tiers``, one after the other; add those in which a save has ``started``."""
        request.both = len(tiers) > 1
        reached: list[TierName] = []
        try:
            for name in tiers:
                reached.append(name)
                request.limit_s = left_s()
                begun = self._begin(name, request)
                if begun is None:
                    continue
                self._wait_captured(begun, request, [begun])
                started.add(name)
                if name == LOCAL:  # a lost process may delay RAM: storage gets half the time
                    limit_s = left_s() / 2
                    with self._job.progress.inside("save", limit_s):
                        self._schedules[name].worker.wait_idle(limit_s)
        except CheckpointError as error:
            self._refuse([name for name in tiers if name not in reached], request.save, error)
            raise
        finally:
            request.release()
            self._roll_storage_back(started)

    @property
    def begun(self) -> Mapping[TierName, SaveId]:
        """The newest save that this process has begun in each tier."""
        return dict(self._begun)

    def store_newest(self, timeout_s: float | None = None) -> None:
        """At a normal end, begin to bring RAM's newest step to storage, where storage lacks it."""
        goes_on = self._goes_on_from is None
        self.ending.store_newest(timeout_s, self._settle_past, goes_on=goes_on)
