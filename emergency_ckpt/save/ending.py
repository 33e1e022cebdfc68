"""The end of a process's saves: at a normal end, after an exception, and after a notice.

1. A normal end acts on a notice that has come since the last step (``end_training``), writes RAM's
   newest step to storage (``store_newest``), waits, ends all threads (``stop``), and warns of a
   last step that storage lacks (``warn_of_unstored``).
2. After an exception the saves in progress get a short time to end (``abandon``).
3. Where the loop does not act on a notice in time, as in a long evaluation, a thread of each
   process does. After half of the grace period these threads bring RAM's newest step to storage
   together (``LastStep``). Shortly before the period is over each thread reports that the present
   step is not saved, since the process cannot report that after the kill.

``LastStep`` writes the step as any other step (``save.persistent``), but the bytes come from the
slots that have the step (``PublishedCapture``), and from the host states in RAM. No array of the
user is read. The leader alone knows what storage has, and sets a cell with its decision. A process
that cannot take part reports that in the rounds of the save, which then fails on all processes;
this failure is no error, since the user has not asked for the save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from absl import logging

from emergency_ckpt.background import chain, closing, join
from emergency_ckpt.cluster.coordination import decode_message
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.process_placement import ProcessPlacement, ram_writers
from emergency_ckpt.cluster.round import Cell, leave_together
from emergency_ckpt.core.limits import ProcessIndex
from emergency_ckpt.core.placement import RamWriters
from emergency_ckpt.core.save.ending import (
    Overdue,
    missed_text,
    overdue_work,
    step_for_storage,
    unstored_text,
)
from emergency_ckpt.core.timeline import check_save, life_of
from emergency_ckpt.errors import (
    CheckpointError,
    CoordinationError,
    DeadlineExceeded,
    HostStateError,
    InvalidState,
)
from emergency_ckpt.save.announcements import DueSaves
from emergency_ckpt.save.local_save import SaveResult
from emergency_ckpt.save.persistent.capture import PublishedCapture
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.save.save_work import SavedSteps, SaveWork, TierSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.state.host_state import HostStateDocument, decode_of
from emergency_ckpt.storage.calls import release_workers
from emergency_ckpt.types import LOCAL, PERSISTENT, OrbaxStep, SaveId, TierName

_STOP_TIMEOUT_S = 30.0
_LEAST_STOP_S = 1.0
_LOOK_S = 1.0
_JOIN_S = 5.0
_END_S = 30.0
"""Longest wait for the leader to announce no more steps: all processes of a job end together."""


def inside_save(operation: str, target: str) -> InvalidState:
    """Return the error of a call that a signal handler makes inside ``save``."""
    problem = "this thread is in save already, and a signal handler has interrupted it"
    hint = "call request_preemption in the handler: the next step is saved then"
    return InvalidState(operation, target, problem, hint=hint)


def _not_ended(name: TierName) -> DeadlineExceeded:
    return DeadlineExceeded("wait for", f"the save to the {name} tier", "it has not ended in time")


class Ending:
    """Ends a process's saves. For the training thread.

    Args:
      entry: a lock that ``save`` holds, so that no other thread begins a save meanwhile.

    Attributes:
      last_step: of the last call of ``save`` or ``should_save`` since the start or a restore; None
        without a call.
      is_saving: the thread that holds ``entry`` is in ``save``.
      is_past_notice: the loop came to another step after that of a notice: the job goes on.
      is_restoring: while True, no step is announced or brought to storage.
    """

    def __init__(
        self,
        job: Job,
        saves: TierSaves,
        schedules: Mapping[TierName, TierSchedule],
        saved: SavedSteps,
        work: SaveWork,
        due: DueSaves,
        entry: threading.RLock,
    ) -> None:
        self._job, self._saves = job, saves
        self._schedules = schedules
        self._saved = saved
        self._work = work
        self._due = due
        self._entry = entry
        self.last_step: int | None = None
        self.is_saving = self.is_restoring = False
        self.is_past_notice = False
        self._left = self._heard_at_end = False
        self._newest: LastStep | None = None
        if saves.persistent is not None and PERSISTENT in schedules:
            self._newest = LastStep(job, saves, saves.persistent, schedules[PERSISTENT], saved)
        self._done_for_notice = set[Overdue]()
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch_notice, name="eckpt-overdue", daemon=True
        )
        self._thread.start()

    @property
    def _ends_at(self) -> int | None:
        """The step at which a notice ends this job; None without a notice, or if the job goes on.

        The grace period of a notice that did not end the job limits no wait.
        """
        return None if self.is_past_notice else self._job.watch.sync_step

    def begin_restore(self) -> None:
        """Announce no more steps, before a restore; wait for the saves in progress."""
        with self._entry:
            if self.is_saving:
                raise inside_save("restore", "state")
            self.is_restoring = True
        self.stop_announcing()
        for schedule in self._schedules.values():  # of a save that began in another thread
            schedule.worker.wait_idle(self._job.config.longest_wait_s)

    def stop_announcing(self) -> None:
        """Announce no more steps until ``end_restore``. Blocks for the leader. Idempotent."""
        self._due.stop(_END_S)

    def end_restore(self, number: int) -> None:
        """Announce steps again, after a restore that succeeded, failed or could not begin.

        ``number``: of restores so far, this one included.
        """
        self.is_restoring = False
        self.last_step = None
        self._due.start_again(number)

    # Waiting and ending.

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """As ``EmergencyCheckpointer.wait_until_finished``."""
        with self._job.progress.inside("wait_until_finished", self._job.config.longest_wait_s):
            deadline_s = self._deadline_s(timeout_s)
            self._wait_for_saves(deadline_s)
            preservation = self._saves.preservation
            if preservation is not None and self._ends_at is not None:
                preservation.let_go()  # the save of the notice is there, and the time is short
            elif preservation is not None:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not preservation.wait_idle(left_s):
                    target, problem = "the removal of old steps", "not done in time"
                    raise DeadlineExceeded("wait for", target, problem)
            if self._job.watch.sync_step is not None and not self._left:
                self._left = True
                leave_together(self._job.coordinator, max(1.0, self._job.watch.grace_left_s()))

    def wait_for_local(self, result: SaveResult | None, timeout_s: float | None = None) -> bool:
        """Wait for one save to RAM; return whether that is complete. As ``wait_until_finished``.

        Without a ``result`` no save has begun.
        """
        if result is None:
            return False
        with self._job.progress.inside("wait_until_finished", self._job.config.longest_wait_s):
            if not result.wait(max(0.0, self._deadline_s(timeout_s) - time.monotonic())):
                raise _not_ended(LOCAL)
        return result.is_complete

    def wait_before_restore(self) -> None:
        """Wait for the saves in progress; a removal of old steps ends after its present step.

        Only process 0 removes steps: it must not keep the others waiting.
        """
        # A job that restores goes on after a notice.
        self.is_past_notice = self._job.watch.sync_step is not None
        with self._job.progress.inside("restore", self._job.config.longest_wait_s):
            self._wait_for_saves(self._deadline_s(None))
        if self._saves.preservation is not None:
            self._saves.preservation.let_go()

    def _wait_for_saves(self, deadline_s: float) -> None:
        for name, schedule in self._schedules.items():
            if not schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic())):
                step = self._ends_at
                if step is not None and step not in self._saved.of(name):
                    self.say_not_written(name, step, "the time is over")
                raise _not_ended(name)

    def _deadline_s(self, timeout_s: float | None) -> float:
        """Return the end of ``timeout_s`` (None: of the longest wait), or of a grace period."""
        limit_s = self._job.config.longest_wait_s if timeout_s is None else timeout_s
        if self._ends_at is not None:
            limit_s = min(limit_s, self._job.watch.grace_left_s())
        return time.monotonic() + limit_s

    def end_training(self, timeout_s: float | None = None) -> None:
        """Announce no more steps, and act on a notice that has come since the last step."""
        self._due.stop(min(_END_S, self._deadline_s(timeout_s) - time.monotonic()))
        watch = self._job.watch
        self._heard_at_end = watch.reached_at_end()
        if self._heard_at_end:
            left_s = watch.grace_left_s()
            self._job.events.emit("preemption.reached", step=watch.sync_step, grace_s=left_s)

    def store_newest(
        self, timeout_s: float | None, settle: Callable[[SaveId], None], *, goes_on: bool
    ) -> None:
        """At a normal end, begin to bring RAM's newest step to storage, where storage lacks it.

        Each process that ends well calls this method once. It blocks for saves in progress and for
        the leader. A run that has only read changes nothing.

        Args:
          settle: decides which steps count beside a save to storage.
          goes_on: False where nothing was saved since a step was restored by its number.
        """
        self._end_watch()
        newest = self._newest
        if newest is None or self.last_step is None:
            return
        if not goes_on:
            newest.reason = "nothing was saved since an older step was restored by its number"
            return
        deadline_s = self._deadline_s(timeout_s)
        is_idle = all(
            schedule.worker.wait_idle(max(0.0, deadline_s - time.monotonic()))
            for schedule in self._schedules.values()
        )
        placement = self._work.placement if is_idle else None
        decision = newest.agree(placement, deadline_s, self._job.inspect)
        if decision is not None and decision.stored is not None and placement is not None:
            settle(decision.stored)
            newest.begin(decision, placement)

    def warn_of_unstored(self) -> None:
        """After a normal end, warn if storage lacks the last step: RAM is lost with its hosts."""
        persistent, newest = self._saves.persistent, self._newest
        if persistent is None or newest is None or self._job.process[0] != 0:
            return
        in_ram = max(self._saved.of(LOCAL), default=None)
        text = unstored_text(self.last_step, persistent.newest_listed(), in_ram, newest.reason)
        if text:
            self._job.events.emit("stop.not_saved", step=self.last_step, text=text)

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait for the saves under way, at most for a notice's grace period; end all threads."""
        try:
            self.wait_until_finished(timeout_s)
            step = self._job.watch.sync_step
            if self._heard_at_end and step is not None:
                why = f"the newest that is saved is {self._saved.newest()}"
                for name in self._schedules:
                    if step not in self._saved.of(name):
                        self.say_not_written(name, step, why)
        finally:
            is_short = self._ends_at is not None
            left_s = self._job.watch.grace_left_s() if is_short else _STOP_TIMEOUT_S
            self.end_threads(min(_STOP_TIMEOUT_S, max(_LEAST_STOP_S, left_s)))

    def abandon(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for saves in progress, then end all threads; never raise.

        Where a notice is overdue, this bad end reports the missed notice.
        """
        self._end_watch()
        since_s = self._job.watch.overdue_s
        if since_s is not None:
            self._tell_missed(since_s)
        deadline_s = time.monotonic() + timeout_s
        try:
            self.wait_until_finished(timeout_s)
        except CheckpointError as error:
            logging.error("saves in progress are cancelled: %s", error)
        self.end_threads(max(1.0, (deadline_s - time.monotonic()) / 3))

    def end_threads(self, timeout_s: float) -> None:
        """End each thread after its present work, if that takes no longer than ``timeout_s``."""
        self._end_watch()
        self._due.stop()
        if self._saves.persistent is not None:
            self._saves.persistent.end_waits()
        ended = [schedule.worker.stop(timeout_s) for schedule in self._schedules.values()]
        if self._saves.preservation is not None:
            ended.append(self._saves.preservation.stop(timeout_s))
        self._work.close()
        if not all(ended):
            # Storage may not answer for hours, and the interpreter's end would wait for its calls.
            release_workers()

    def say_not_written(self, name: TierName, step: int, why: str) -> None:
        """Report that a tier does not have the step of a notice."""
        self._job.events.emit("preemption.missed", cause="not_written", step=step, tier=name)
        logging.error("preempted: step %d is not in the %s tier, %s", step, name, why)

    # A notice on which the loop does not act in time.

    def _end_watch(self) -> None:
        """End the thread that looks for such a notice. Idempotent."""
        self._closing.set()
        join(self._thread, _JOIN_S)

    def _watch_notice(self) -> None:
        watch, grace_s = self._job.watch, self._job.config.preemption_grace_s
        pause_s = min(_LOOK_S, grace_s / 20)
        while watch.is_on and not self._closing.wait(pause_s):
            since_s = watch.overdue_s
            if since_s is None:
                continue
            work = overdue_work(since_s, grace_s, self._done_for_notice)
            if work == "tell":
                self._tell_missed(since_s)
                return
            if work == "bring":
                self._done_for_notice.add("bring")
                try:
                    self._bring_newest(time.monotonic() + grace_s - since_s)
                except Exception:  # noqa: BLE001 - logged; the missed notice must be reported
                    logging.exception("the newest step of RAM is not brought to storage")

    def _bring_newest(self, deadline_s: float) -> None:
        """Begin, with the other processes, to bring RAM's newest step to storage.

        Nothing begins while ``save`` runs.
        """
        newest, placement, watch = self._newest, self._work.placement, self._job.watch
        if newest is None or placement is None or not self._job.config.saves_at_preemption:
            return

        def inspect() -> None:
            if self._closing.is_set() or self.is_restoring or watch.sync_step is not None:
                raise CheckpointError("wait for", "the decision of process 0", "the loop goes on")

        decision = newest.agree(placement, deadline_s, inspect, goes_on=True)
        if decision is None or not self._entry.acquire(blocking=False):
            return
        try:
            is_idle = all(schedule.worker.wait_idle(0) for schedule in self._schedules.values())
            if is_idle and not self.is_restoring and watch.sync_step is None:
                newest.begin(decision, placement)
        finally:
            self._entry.release()

    def _tell_missed(self, since_s: float) -> None:
        """Report, once, that the loop has not acted on a notice that came so long ago."""
        with self._telling:
            if "tell" in self._done_for_notice:
                return
            self._done_for_notice.add("tell")
        persistent = self._saves.persistent if self._newest is not None else None
        listed = None if persistent is None else persistent.newest_listed()
        stored = [*self._saved.of(PERSISTENT), *([] if listed is None else [listed])]
        text = missed_text(
            since_s,
            max(self._saved.of(LOCAL), default=None),
            max(stored, default=None),
            has_storage=persistent is not None,
        )
        logging.error("%s", text)
        # An observer of this event may end the process.
        self._job.events.emit("preemption.missed", cause="no_save", text=text)


class LastSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader's decision: a save that RAM has, and how it is written to storage.

    Attributes:
      in_ram: the save in RAM; None: nothing is written.
      stored: the save's identity in storage: a new identity where an earlier attempt may have used
        that of ``in_ram``.
      orbax: what Orbax's readers find, as process 0 has it in RAM.
    """

    in_ram: SaveId | None = None
    stored: SaveId | None = None
    members: tuple[ProcessIndex, ...] = ()
    holders: tuple[ProcessIndex, ...] = ()
    orbax: OrbaxStep = OrbaxStep()


def decision_of(data: bytes, run_id: str, count: int) -> LastSave:
    """Return the leader's decision in a job of ``count`` processes.

    CoordinationError, CorruptData: ``data`` cannot be a decision.
    """
    name = "the last save, process 0"
    decision: LastSave = decode_message(data, LastSave, name)
    if decision.in_ram is None:
        return decision
    members, holders = decision.members, decision.holders
    if decision.stored is None or not holders or not set(holders) <= set(members):
        raise CoordinationError("read", name, "it does not name the save and its writers")
    if max(members) >= count or members[0] != 0 or len(set(members)) < len(members):
        raise CoordinationError("read", name, f"these are no writers of this job: {members}")
    for save in (decision.in_ram, decision.stored):
        check_save(save)
        if (save.step, save.run_id) != (decision.in_ram.step, run_id):
            raise CoordinationError("read", name, f"{save} is not a save of that step and run")
    return decision


class LastStep:
    """Brings the newest step of RAM to storage, once, at the end. For the training thread.

    Attributes:
      reason: why storage lacks the step, as far as this process knows; empty for no such reason.
    """

    def __init__(
        self,
        job: Job,
        saves: TierSaves,
        persistent: PersistentSaves,
        schedule: TierSchedule,
        saved: SavedSteps,
    ) -> None:
        self._job, self._saves = job, saves
        self._persistent = persistent
        self._schedule = schedule
        self._saved = saved
        self._me, self._count = job.process
        self.reason = ""

    def agree(
        self,
        placement: ProcessPlacement | None,
        deadline_s: float,
        inspect: Callable[[], None],
        *,
        goes_on: bool = False,
    ) -> LastSave | None:
        """Return the save that all write to storage now; None for none. Blocks for the leader.

        Args:
          placement: of the newest structure of the state; None where saves are still under way.
          inspect: called during the wait; may raise PeerLeft.
          goes_on: the loop has not ended, and may save again. Then a step of an earlier life, and a
            step that an earlier attempt may have sent to storage, are not written.
        """
        job, in_ram = self._job, self._saves.local.complete
        when = "overdue" if goes_on else "last"
        cell = Cell(job.coordinator, f"{when}/{self._saved.incarnation}")

        def inspect_leader() -> str:
            inspect()
            newest, left_processes = self._saves.local.complete, LeftProcesses(job.coordinator)
            assert newest is not None, "else nothing is waited for"
            return left_processes.absent(PERSISTENT, newest, {0}).get(0, "")

        try:
            if self._me == 0:
                decision = self._decide(placement, goes_on=goes_on)
                if self._count > 1:
                    cell.settle(msgspec.json.encode(decision))
            elif placement is None or in_ram is None:
                return None
            elif in_ram.step <= max(self._persistent.steps, default=-1):
                return None  # storage lacks nothing, as far as this process knows
            else:
                left_s = max(0.0, deadline_s - time.monotonic())
                data = cell.wait(left_s, inspect_leader)
                decision = decision_of(data, job.config.run_name, self._count)
        except CheckpointError as error:
            self.reason = str(error)
            return None
        return decision if decision.in_ram is not None else None

    def begin(self, decision: LastSave, placement: ProcessPlacement) -> None:
        """Begin this process's part in the background; ``reason`` names a failure afterwards."""
        in_ram, stored = decision.in_ram, decision.stored
        assert in_ram is not None, "there is something to write"
        assert stored is not None, "and it has a name in storage"
        persistent, members = self._persistent, decision.members
        self._schedule.note_due(stored.step)
        try:
            document = self._own_document(in_ram)
        except CheckpointError as error:
            self.reason = reason = str(error)
            self._schedule.start(lambda: persistent.leave_out(stored, members, reason[:500]))
            return
        shards = placement.held if self._me in decision.holders else ()
        capture = PublishedCapture(self._job.tier, in_ram, placement.leaves, shards)
        metrics = decision.orbax.metrics
        job = PersistentSave(
            save=stored,
            tree=placement.tree,
            load=capture.load,
            host_state=document.payload,
            topology=placement.topology,
            writers=members,
            metrics=metrics if isinstance(metrics, dict) else None,
            keeps=self._saved.restored,
            orbax=decision.orbax,
            holders=decision.holders,
            is_due=False,
        )

        def work() -> None:
            is_complete = persistent.run(job)
            self.reason = persistent.problem
            capture.close(is_written=is_complete)

        self._schedule.start(closing(capture, chain(work)))

    def _decide(self, placement: ProcessPlacement | None, *, goes_on: bool) -> LastSave:
        """Return the decision, at the leader; nothing where it fails."""
        if placement is None:
            self.reason = "saves in progress have not ended in time"
            return LastSave()
        complete, timelines = self._saves.local.complete, self._job.timelines
        writers, rejection = RamWriters(), ""
        if complete is not None:
            rejection = timelines.rejection_reason(complete.step, complete.incarnation)
            writers = ram_writers(self._job.config, placement)
        save, self.reason = step_for_storage(
            complete,
            self._persistent.newest_listed(),
            rejection,
            writers.members,
            is_paced=goes_on or self._schedule.plan.is_paced,
        )
        if save is None:
            return LastSave()
        is_new = self._schedule.is_behind(save.step)
        if goes_on and not (is_new and life_of(save.incarnation) == self._saved.incarnation):
            self.reason = f"step {save.step} is not one that this life saved to RAM alone"
            return LastSave()
        try:
            orbax = self._own_document(save).orbax
        except CheckpointError as error:
            self.reason = str(error)
            return LastSave()
        # An attempt that failed may have used the names of a step that is not new.
        stored = save if is_new else self._saved.identity(save.step, forced=True)
        return LastSave(save, stored, writers.members, writers.holders, orbax)

    def _own_document(self, save: SaveId) -> HostStateDocument:
        """Return this process's host state of ``save``, from RAM. HostStateError, CorruptData."""
        data = self._job.tier.host_state_bytes(save, self._me, self._count)
        if data is None:
            problem = f"process {self._me} does not have its own in RAM"
            raise HostStateError("read", f"host state of step {save.step}", problem)
        return decode_of(save, self._me, self._count, data)
