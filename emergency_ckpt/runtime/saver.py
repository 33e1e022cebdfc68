"""One process's saves: decides, takes snapshots, hands them to the background. No storage, no RPC.

Everything here runs in the training thread, but for the short functions that it submits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from emergency_ckpt.core.save_agreement import TierName
from emergency_ckpt.core.save_decision import plain_metrics
from emergency_ckpt.errors import CheckpointError, DeadlineExceeded
from emergency_ckpt.runtime.due_saves import DueSaves
from emergency_ckpt.runtime.going_on import leave_together
from emergency_ckpt.runtime.local_saves import LocalSave
from emergency_ckpt.runtime.persistent_saves import PersistentSave
from emergency_ckpt.runtime.preemption import PREEMPTED_EXIT_CODE
from emergency_ckpt.runtime.restore_runner import Restored
from emergency_ckpt.runtime.save_policies import SavePlan
from emergency_ckpt.runtime.save_recipe import SaveRecipe, build_recipe
from emergency_ckpt.runtime.save_request import SaveRequest
from emergency_ckpt.runtime.saved_steps import SavedSteps
from emergency_ckpt.runtime.saver_parts import SaverParts, longest_wait_s, note_skipped, start_facts
from emergency_ckpt.runtime.tier_schedule import TierSchedule
from emergency_ckpt.runtime.worker import closing, in_turn
from emergency_ckpt.tiers.device_copies import DeviceCopies
from emergency_ckpt.tiers.state_tree import PyTree, TreeDef, check_values, describe
from emergency_ckpt.tiers.transfers import Snapshot
from emergency_ckpt.types import SaveId

_STOP_TIMEOUT_S = 30.0
_Work = Callable[[], None]


class Saver:
    """Saves to both tiers. For the training thread."""

    def __init__(
        self, parts: SaverParts, plans: Mapping[TierName, SavePlan], incarnation: str
    ) -> None:
        """``plans``: of the tiers that are on, the local one first."""
        self._parts = parts
        self._schedules: dict[TierName, TierSchedule] = {
            name: TierSchedule(name, plan, parts.failures, parts.settings.save_niceness)
            for name, plan in plans.items()
        }
        self._recipe: SaveRecipe | None = None
        self._saved = SavedSteps(parts.local, parts.persistent, incarnation, parts.run_id)
        self._newest_due = -1
        self._named_ignored = False
        self._copies = DeviceCopies(parts.settings.snapshots.device_copy_bytes)
        self._left = False
        self._begun: dict[TierName, SaveId] = {}
        self._goes_on_from: SaveId | None = None
        self._due = DueSaves(
            self._schedules,
            parts.coordinator,
            parts.failures,
            timeout_s=parts.settings.save_timeout_s,
        )

    def begin_restore(self) -> None:
        """Before a restore: nothing more is agreed. Collective, with ``end_restore``."""
        self._due.stop()

    def end_restore(self, restored: Restored | None, *, keep_newer: bool = False) -> None:
        """After it: go on from what was restored; None when nothing was.

        ``keep_newer``: newer steps are in RAM still; the next save forgets them.
        """
        self._due.start_again()
        if restored is None:
            return
        self._saved.start_from(restored)
        self._goes_on_from = restored.save if keep_newer else None
        self._newest_due = restored.report.step
        for schedule in self._schedules.values():
            schedule.restart_from(restored.report.step)

    def go_on_after(self, newest: Mapping[TierName, int]) -> None:
        """These are the newest steps of the tiers: up to them none is due any more."""
        self._saved.note_found(newest)
        self._newest_due = max(newest.values(), default=-1)
        for name, schedule in self._schedules.items():
            if name in newest:
                schedule.restart_from(newest[name])

    @property
    def saved(self) -> SavedSteps:
        """Which steps are whole, as this process knows."""
        return self._saved

    def save(
        self,
        step: int,
        state: PyTree,
        host_state: object,
        *,
        force: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """As ``EmergencyCheckpointer.save``."""
        reached = self._parts.watch.reached(step)
        due = self._due.take(step, force=force, preempted=reached)
        preempted = reached and self._parts.watch.sync_step == step
        if not due and not preempted:
            if step <= self._newest_due:
                self._note_ignored(step)
            return False
        if self._goes_on_from is not None:
            self._parts.tier.invalidate_newer(self._goes_on_from)
            self._parts.timelines.bind()
            self._goes_on_from = None
        plain = None if metrics is None else plain_metrics(metrics)
        save = self._saved.identity(step, demanded=force or preempted)
        request = SaveRequest(save, state, host_state, plain, time.monotonic())
        request.must_exist = force or preempted
        if preempted:
            return self._save_preempted(request)
        started = [name for name, number in due.items() if self._start(name, request, number)]
        if started and not self._parts.settings.async_save:
            self.wait_until_finished()
        return bool(started)

    def _note_ignored(self, step: int) -> None:
        """Say it once: the steps of a loop rise, and one that does not is probably a mistake."""
        if not self._named_ignored:
            self._named_ignored = True
            self._parts.events.emit("save.ignored", step=step, newest=self._newest_due)

    def _start(self, name: TierName, request: SaveRequest, number: int | None = None) -> bool:
        """Whether a save was started: not where the step is there, or the one before goes on."""
        schedule, save = self._schedules[name], request.save
        if request.must_exist and self._saved.holds(name, request.step):
            return False
        is_again = schedule.last_started == request.step
        schedule.note_due(request.step)
        self._newest_due = max(self._newest_due, request.step)
        limit_s = longest_wait_s(self._parts, name) if request.limit_s is None else request.limit_s
        each_time = request.must_exist or name != "persistent"
        if not schedule.wait_idle(limit_s, each_time=each_time):
            note_skipped(self._parts, name, save, limit_s, is_again=is_again)
            return False
        if request.must_exist and self._saved.holds(name, request.step):
            return False  # it was the save that has just ended
        if schedule.pauses and not request.must_exist and self._tell_pause(schedule, save):
            return False
        snapshot, work = self._snapshot(name, save, request)
        first = self._parts.before_save(request.step)
        if first is not None:
            work = in_turn(first, work)
        if number is not None:
            work = self._when_confirmed(name, request.step, number, work)
        # Training waits neither for others, for whom the reader may have to wait, nor for storage.
        waits = name == "persistent" or first is not None or number is not None
        snapshot.start(everything=waits)
        self._parts.events.emit("save.started", step=request.step, tier=name)
        with contextlib.ExitStack() as kept:
            if name == "persistent":
                # Until it is over: local saves go on, and with them what is pushed for those.
                kept.enter_context(self._parts.inbox.kept(save))
            schedule.start(closing(kept.pop_all(), closing(snapshot, work)))
        self._begun[name] = save
        if not snapshot.wait_captured(self._parts.settings.save_timeout_s):
            snapshot.close()  # fails the save; training goes on
        schedule.note_started(request.step, time.monotonic() - request.begun_s)
        return True

    def _tell_pause(self, schedule: TierSchedule, save: SaveId) -> bool:
        """Leave ``save`` out everywhere, after those that have failed: at the first writer only."""
        persistent, recipe = self._parts.persistent, self._recipe
        if persistent is None or recipe is None:
            return False
        schedule.start(lambda: persistent.tell_pause(save, recipe.writers))
        return True

    def _when_confirmed(self, name: TierName, step: int, number: int, work: _Work) -> _Work:
        """The step was reached before the leader's word: wait for it in the background."""
        due, parts = self._due, self._parts

        def wait_and_work() -> None:
            if due.word_on(number) is False:
                parts.events.emit("save.dropped", step=step, tier=name)
            else:
                # No word at all: the others may be saving. The vote finds out.
                work()

        return wait_and_work

    def _snapshot(
        self, name: TierName, save: SaveId, request: SaveRequest
    ) -> tuple[Snapshot, _Work]:
        """Take what is to be saved; also returns what is left to be done in the background."""
        flat, treedef = jax.tree_util.tree_flatten(request.state)
        recipe = self._recipe_for(request.state, flat, treedef)
        check_values(recipe.tree, flat, "save")
        payload = request.capture()
        if name == "local":
            local, snapshot = self._parts.local, recipe.local.take(flat)
            job = LocalSave(
                save=save,
                leaves=recipe.leaves,
                layout=recipe.layout,
                snapshot=snapshot,
                host_state=payload,
                buddies=recipe.buddies,
            )
            return snapshot, lambda: local.run(job)
        me = self._parts.process[0]
        writes = me in recipe.writers
        snapshot = recipe.all_held.take(flat) if writes else Snapshot.of_views([])
        held = recipe.held if writes else ()
        work = self._persistent_work(
            PersistentSave(
                save=save,
                tree=recipe.tree,
                load=lambda: dict(zip(held, snapshot.collect(), strict=True)),
                host_state=payload,
                topology=recipe.topology,
                writers=recipe.writers,
                metrics=request.metrics,
                keeps=self._saved.restored,
            ),
            publishes=me == recipe.writers[0],
        )
        return snapshot, work

    def _persistent_work(self, job: PersistentSave, *, publishes: bool) -> _Work:
        persistent, preservation = self._parts.persistent, self._parts.preservation
        assert persistent is not None
        schedule = self._schedules["persistent"]

        def work() -> None:
            complete = persistent.run(job)
            if not publishes:
                return
            # This process decides for all when to try again: the others hear of a pause.
            schedule.note_outcome(failed=not complete)
            if complete and preservation is not None:
                preservation.after_save(job.save.step)

        return work

    def should_save(self, step: int) -> bool:
        """As ``EmergencyCheckpointer.should_save``."""
        reached = self._parts.watch.reached(step)
        return self._due.look(step, preempted=reached) or self._parts.watch.sync_step == step

    # Preemption.

    def reached_preemption(self, step: int) -> bool:
        """As ``EmergencyCheckpointer.reached_preemption``."""
        return self._parts.watch.reached(step)

    def _save_preempted(self, request: SaveRequest) -> bool:
        """Save in all tiers, whatever the policies say: first to RAM, which is quick."""
        parts, watch = self._parts, self._parts.watch
        parts.events.emit("preemption.reached", step=request.step, grace_s=watch.grace_left_s())
        started = False
        for name, schedule in self._schedules.items():
            if not (parts.settings.save_on_preemption or schedule.plan.on_preemption):
                continue
            request.limit_s = watch.grace_left_s()
            if self._start(name, request):
                started = True
                if name == "local":
                    schedule.worker.wait_idle(watch.grace_left_s())
            elif not self._saved.holds(name, request.step):
                self._say_not_written(name, request.step)
        if parts.settings.exit_on_preemption:
            self._exit(request.step)
        return started

    def _exit(self, step: int) -> None:
        try:
            self.wait_until_finished()
        except CheckpointError as error:
            logging.error("preempted at step %d: %s", step, error)
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def _say_not_written(self, name: TierName, step: int) -> None:
        self._parts.events.emit("preemption.not_written", step=step, tier=name)
        logging.error("preempted: step %d is not in the %s tier, the time is over", step, name)

    @property
    def begun(self) -> Mapping[TierName, SaveId]:
        """The newest save that this process has begun in each tier."""
        return dict(self._begun)

    # Waiting and ending.

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """As ``EmergencyCheckpointer.wait_until_finished``."""
        settings, sync_step = self._parts.settings, self._parts.watch.sync_step
        longest_s = 4 * settings.save_timeout_s + 4 * settings.persistent_timeout_s
        deadline_s = time.monotonic() + (longest_s if timeout_s is None else timeout_s)
        if sync_step is not None:
            deadline_s = min(deadline_s, time.monotonic() + self._parts.watch.grace_left_s())
        for name, schedule in self._schedules.items():
            if not schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic())):
                if sync_step is not None:
                    self._say_not_written(name, sync_step)
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

    def is_idle(self, timeout_s: float) -> bool:
        """Whether no save is under way; waits so long for each tier at most. From any thread."""
        return all(s.worker.wait_idle(timeout_s) for s in self._schedules.values())

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, after a notice not beyond its grace; then end all threads."""
        watch = self._parts.watch
        if watch.reached_at_end() and watch.sync_step is not None:
            left_s = watch.grace_left_s()
            self._parts.events.emit("preemption.reached", step=watch.sync_step, grace_s=left_s)
        try:
            self.wait_until_finished(timeout_s)
        finally:
            self.end_threads(_STOP_TIMEOUT_S)

    def abandon(self, timeout_s: float) -> None:
        """Wait so long for what is under way, then end what threads can be ended; never raise."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self.wait_until_finished(timeout_s)
        except CheckpointError as error:
            logging.error("saves under way are given up: %s", error)
        self.end_threads(max(1.0, (deadline_s - time.monotonic()) / 3))

    def end_threads(self, timeout_s: float) -> None:
        """End each thread, after what it is at, if that takes no longer than ``timeout_s``."""
        self._due.stop()
        if self._parts.persistent is not None:
            self._parts.persistent.end_waits()
        for schedule in self._schedules.values():
            schedule.worker.stop(timeout_s)
        if self._parts.preservation is not None:
            self._parts.preservation.stop(timeout_s)

    # What a save consists of.

    def _recipe_for(self, state: PyTree, flat: list[Any], treedef: TreeDef) -> SaveRecipe:
        if self._recipe is None or not self._recipe.local.matches(flat, treedef):
            settings, process = self._parts.settings, self._parts.process
            tree = describe(state, "save")
            self.use_recipe(build_recipe(tree, settings, process, self._copies))
        assert self._recipe is not None
        return self._recipe

    def use_recipe(self, recipe: SaveRecipe, *, in_background: bool = False) -> None:
        """Save states of this structure, reserve their slots; RamdiskFull when there is no room."""
        if self._recipe is None:
            facts = start_facts(self._parts, recipe, self._schedules)
            self._parts.events.emit("start.ready", **facts)
        self._recipe = recipe
        if "local" not in self._schedules:
            return
        tier, size_bytes = self._parts.tier, recipe.layout.size_bytes
        if in_background:  # training waits for nothing that the first save does not need yet
            tier.check_reservable(size_bytes)
            tier.prefault_in_background(size_bytes)
        else:
            tier.reserve(size_bytes)
            tier.prefault_in_background()
