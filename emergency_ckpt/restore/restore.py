"""The protocol of a restore, as every process carries it out. Read this file first.

1. Report. Each process reports to the leader, process 0, what its RAM has and what state it wants.
2. Choose. The leader chooses the step, and sends all the places of its copies (``leader``). The
   processes send all messages in such rounds (``rounds``): each process reports how far it is, and
   the leader answers what all do next.
3. Load. A step in storage is read by all (``storage_load``), each byte once over the job, into the
   memory that 4 fills. Then all report again, and the step is from here on as a step in RAM.
4. Place. Each process verifies its own shards, chooses among the copies of lost shards and fetches
   them from peers (``shards``), and gives their memory to JAX.
5. Host state. The documents are fetched, sent to the buddies, and applied (``host_state``).
6. Agree. Each process reports how 3, or 4 and 5, went. All get one answer: done, with the new
   incarnation; once more from 2, without the copies that failed; or the end with an error.
7. Settle. Each process forgets newer saves. The caller ends this with a round: no process begins
   the new incarnation, or trains, before all have settled.

``run`` is 1 to 6 and changes nothing of the saves to come; ``settle`` is 7.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from absl import logging

from emergency_ckpt.cluster.beats import Beats
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.core.restore.inventory import RestoredSave
from emergency_ckpt.core.restore.plan_types import Copies, NoPlan, Rejection, RestorePlan
from emergency_ckpt.core.wording import TIER_WORDS
from emergency_ckpt.errors import CheckpointError, RestoreFailed
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.host_state import HostStateRestore, fetch_documents
from emergency_ckpt.restore.leader import RestoreLeader
from emergency_ckpt.restore.request import (
    RestoredState,
    RestoreReport,
    RestoreRequest,
    described,
    no_plan_error,
)
from emergency_ckpt.restore.room import RestoreRoom
from emergency_ckpt.restore.rounds import (
    AllDone,
    Next,
    RestoreRounds,
    Row,
    Status,
    refuse,
    status_of,
)
from emergency_ckpt.restore.shards import ShardCollection
from emergency_ckpt.restore.storage_load import LoadPlan, StorageLoad, passed_over
from emergency_ckpt.state.materialize import materialize
from emergency_ckpt.state.tree import BoxTable, PyTree
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, TierName
from emergency_ckpt.work_progress import WorkProgress

_Plan = TypeVar("_Plan", RestorePlan, LoadPlan)
_T = TypeVar("_T")

_PHASES = ("plan", "load", "shards", "host_state", "agree")
_WAITS = ("plan", "agree")
"""Phases in which a process waits for others."""
_MOST_PASSED_OVER = 8


class Restore:
    """One restore on this process: ``run``, then ``settle``; each once, on all processes.

    Args:
      name: of this restore, the same on all processes, and used once.
    """

    def __init__(
        self,
        job: Job,
        request: RestoreRequest,
        name: str,
        *,
        host_state: HostStateRestore,
    ) -> None:
        self._job = job
        self._name = name
        self._request = request
        self._host_state = host_state
        self._me, count = job.process
        limits = job.config.time_limits
        end_s = time.monotonic() + limits.total_s
        self._progress = WorkProgress(limits)
        self._beats = Beats(
            job.coordinator,
            f"{name}/beats",
            self._progress,
            limits,
            lambda fields: job.events.emit("restore.progress", **fields),
            is_leader=self._me == 0,
        )
        self._calls = HolderCalls(job.client, job.events, self._progress)
        boxes = BoxTable(request.tree, count)
        self._targets = boxes.shards_of(self._me)
        self._boxes = boxes
        leader: RestoreLeader | None = None
        if self._me == 0:
            leader = RestoreLeader(job, request, boxes.targets(), self._calls, end_s)
        # Nothing here refers to this object: a cycle would keep the state until it is collected.
        self._rounds = RestoreRounds(
            job.coordinator,
            name,
            job.restores,
            request.tree.wanted,
            leader,
            deadline_s=end_s,
            step=request.requested_step,
            check=self._beats.check,
        )
        saves_to_ram = LOCAL in job.config.save_plans()
        self._room = RestoreRoom(job.tier, "" if saves_to_ram else "this job saves nothing to RAM")
        self._spent_s: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self._loading: int | None = None  # the newest plan's step to be loaded into RAM
        self._loaded_bytes = 0  # read by this process, also of steps that failed on another

    def run(self) -> RestoredState | None:
        """Restore the state; return None where there never was a complete step.

        Collective; blocks while something moves here, or on a process that is waited for. This
        object keeps no reference to the state.

        Raises:
          RestoreFailed: on all processes, when the restore fails on one. Where there are steps but
            none may be restored, all processes raise the error of ``no_plan_error``.
        """
        try:
            with contextlib.ExitStack() as sending:
                try:
                    sending.enter_context(self._beats)
                except RuntimeError as error:  # the others wait for this process
                    refuse(self._job.coordinator, self._name, self._job.restores, error)
                    raise RestoreFailed("start", "a thread of the restore", str(error)) from error
                return self._run()
        finally:
            self._job.holdings.end_loaded()
            # Deleted once all are in the next round, and so read these beats no more.
            if self._me == 0:
                self._job.restores.add(self._beats.name)
            spent = {f"{name}_seconds": seconds for name, seconds in self._spent_s.items()}
            self._job.events.emit("restore.phases", **spent)

    def _run(self) -> RestoredState | None:
        with self._phase("plan"):
            answer = self._rounds.hold(self._report())
        self._beats.all_came(range(self._job.process[1]))
        restored: RestoredState | None = None
        while True:
            match answer:
                case LoadPlan():
                    _, answer = self._on_all(answer, self._load)
                case RestorePlan():
                    restored, answer = self._on_all(answer, self._restore)
                case NoPlan():
                    for note in answer.notes:
                        self._job.events.emit("restore.note", text=note)
                    self._report_rejected(answer.rejected)
                    if answer.kind != "nothing":
                        raise no_plan_error(answer, f"run {self._job.config.run_name!r}")
                    return None
                case AllDone():
                    assert restored is not None, "every process has its part"
                    self._job.tier.note_incarnation(answer.incarnation)
                    return dataclasses.replace(
                        restored, incarnation=answer.incarnation, all_kept=answer.all_kept
                    )

    # 1 and 2: report, choose.

    def _report(self) -> Row:
        tier = self._job.tier
        inventory, needs = described(self._job.holdings, self._boxes)
        return self._rounds.report(
            inventory,
            needs=needs,
            wants_host_state=self._request.wants_host_state,
            damaged=tier.damaged(),
            restored=tier.restored(),
        )

    def _report_plan(self, plan: RestorePlan | LoadPlan, tier: TierName) -> None:
        if plan.step == self._loading:
            return  # the plan to load the step was reported
        self._job.events.emit(
            "restore.stage", stage="planned", step=plan.step, tier=tier, rejected=len(plan.rejected)
        )
        self._report_rejected(plan.rejected)

    def _report_rejected(self, rejected: Sequence[Rejection]) -> None:
        for rejection in rejected:
            self._job.events.emit(
                "restore.rejected",
                step=rejection.step,
                tier=rejection.tier,
                reason=rejection.reason,
            )

    # 3: load.

    def _load(self, plan: LoadPlan) -> Row:
        """Read this process's part of a persistent step; return this process's new report."""
        job, now_s = self._job, time.monotonic()
        self._report_plan(plan, PERSISTENT)
        self._loading = plan.step
        job.holdings.end_loaded()
        assert job.persistent is not None, "only a checkpointer with a directory plans for it"
        load = StorageLoad(
            job.tier,
            job.persistent,
            plan,
            me=self._me,
            leaves=[leaf.spec for leaf in self._request.tree.leaves],
            targets=self._targets,
            retained=self._request.retained,
            progress=self._progress,
            room=self._room,
        )
        with self._phase("load"):
            job.holdings.loaded = load.read()
        self._loaded_bytes += load.nbytes
        job.events.emit(
            "restore.stage",
            stage="loaded",
            step=plan.step,
            bytes_persistent=self._loaded_bytes,
            seconds=time.monotonic() - now_s,
        )
        return self._report()

    # 4 and 5: place, host state.

    def _restore(self, plan: RestorePlan) -> RestoredState:
        """Bring this process's part of a step in RAM onto its devices, and apply its host state."""
        job, save = self._job, plan.save
        assert save is not None, "a persistent step is loaded into RAM first"
        copies, loaded = plan.copies.get(self._me, Copies()), job.holdings.loaded
        if loaded is not None and loaded.contents.save != save:
            job.holdings.end_loaded()  # another step is restored
        self._report_plan(plan, LOCAL)
        job.tier.protect([copy.save for copy in job.tier.held()[0]])
        shards = ShardCollection(
            job.tier,
            save=save,
            me=job.holdings.name,
            targets=self._targets,
            retained=self._request.retained,
            calls=self._calls,
            room=self._room,
            addresses=plan.addresses,
            loaded=job.holdings.loaded,
            expendable=passed_over(save, plan.rejected) - {save},
        )
        with self._phase("shards"):
            state = self._place(copies, save, shards)
        lacks_room = bool(self._room.lack)  # for shards: documents are not in slots
        tally, tier = shards.tally, LOCAL
        if plan.is_loaded:
            # Bytes that this process just read from storage do not count as found in its RAM.
            tally.local = max(0, tally.local - self._loaded_bytes)
            tally.persistent, tier = self._loaded_bytes, PERSISTENT
        with self._phase("host_state"):
            documents = fetch_documents(
                job.holdings,
                self._calls,
                self._room,
                plan.every_host_state or copies.host_states,
                plan.addresses,
                save,
                plan.host_state_count or job.process[1],
                job.holdings.name,
                job.process,
            )
            self._host_state.apply(save, documents if plan.host_state_count else ())
        return RestoredState(
            save=save,
            tier=tier,
            state=state,
            tally=tally,
            gathered=shards.gathered,
            is_loaded=plan.is_loaded,
            rejected=plan.rejected,
            timeline=plan.timeline,
            lives=plan.lives,
            lack=self._room.lack,
            lacks_room=lacks_room,
        )

    def _place(self, copies: Copies, save: SaveId, shards: ShardCollection) -> PyTree:
        """Verify, fetch and place the shards; return the state on the devices."""
        with shards.collecting(copies) as arrivals:
            collected = shards.held
            state = materialize(
                self._request.tree,
                self._request.like,
                collected.bytes_of,
                arrivals,
                collected.dtype_of,
                self._job.link.write,
            )
        events, tally = self._job.events, shards.tally
        events.emit(
            "restore.stage",
            stage="fetched",
            step=save.step,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
        )
        for holder, nbytes in sorted(tally.by_holder.items()):
            events.emit(
                "restore.stage", stage="received", step=save.step, holder=holder, size_bytes=nbytes
            )
        return state

    # 6: agree.

    def _on_all(self, plan: _Plan, work: Callable[[_Plan], _T]) -> tuple[_T | None, Next]:
        """Do ``work``, this process's part of ``plan``; return its result, and what comes next.

        The result is None unless all are done. Raises the error that ends the restore on all.
        """
        result, status = None, Status()
        try:
            result = work(plan)
            if isinstance(result, RestoredState):
                status = Status(lacks_room=result.lacks_room)
        except Exception as error:  # noqa: BLE001 - becomes the collective error of all processes
            _forget_frames(error)
            status = status_of(error, plan)
        try:
            with self._phase("agree"):
                answer = self._rounds.hold(result if isinstance(result, Row) else Row(status))
        except BaseException:
            del result  # otherwise the error would keep the arrays
            raise
        if isinstance(answer, AllDone):
            return result, answer
        self._host_state.undo()
        return None, answer

    # 7: settle.

    def settle(self, restored: RestoredState | None, *, started_s: float) -> RestoreReport | None:
        """Forget leftovers beside the step that ``run`` has restored; return the restore's report.

        Not collective: the caller must report an error to all processes, and no process may train
        before all have settled. ``started_s``: when the caller asked for the restore.
        """
        job = self._job
        if restored is None:
            # Leftovers of saves that never became complete must not mix with later saves.
            job.tier.invalidate_newer(SaveId(-1, "", job.config.run_name))
            job.events.emit("restore.nothing")
            return None
        # No leftover may look newer than the newest complete step. After a restore of a requested
        # step, newer steps count until the next save.
        if self._request.requested_step is None:
            job.tier.invalidate_newer(restored.save, restored.timeline)
        if restored.gathered is not None and restored.all_kept:
            # A process without room for its part would need these slots again in the next life.
            job.tier.keep_only(restored.save, restored.gathered)
        job.timelines.learn(restored.timeline, restored.save)
        # Lives without a save are suspect only in a job that saves: others do not count theirs.
        self._note_complete(restored, restored.lives + 1 if job.config.save_plans() else 0)
        self._host_state.finish()
        return self._finished(restored, started_s)

    def _note_complete(self, restored: RestoredState, lives: int) -> None:
        """Record that the step is complete, and that so many ``lives`` in a row began from it.

        A failure is logged and ends nothing, as after a save. The step is complete without the
        record, which only distinguishes a loss of everything from a fresh start. A ramdisk that
        others have filled must not prevent a restore from RAM.
        """
        job, save = self._job, restored.save
        if self._me == 0 and job.stored_chain is not None:
            if restored.is_loaded:  # after a restore from RAM the ledgers in RAM are enough
                job.stored_chain.note_lives_soon(RestoredSave(save, lives))
            job.stored_chain.began_from = save
        try:
            job.tier.note_complete(save, lives=lives)
        except (CheckpointError, OSError) as error:
            text = f"step {save.step} is not on record as complete: {error}"
            logging.warning("%s", text)
            job.events.emit("restore.note", text=text)

    def _finished(self, restored: RestoredState, started_s: float) -> RestoreReport:
        tally = restored.tally
        report = RestoreReport(
            step=restored.save.step,
            tier=restored.tier,
            seconds=time.monotonic() - started_s,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
            bytes_persistent=tally.persistent,
            host_state=self._host_state.restored,
            rejected=restored.rejected,
            link=self._job.link.facts,
        )
        self._job.events.emit(
            "restore.finished",
            step=report.step,
            tier=report.tier,
            seconds=report.seconds,
            bytes_local=tally.local,
            bytes_peer=tally.peer,
            bytes_persistent=tally.persistent,
            passed_over=_passed_over_text(report.rejected),
        )
        newer = [
            rejection
            for rejection in report.rejected
            if rejection.step > report.step and not rejection.is_left
        ]
        if newer and self._me == 0:
            text = "step %d is restored, and newer steps are passed over: %s"
            logging.warning(text, report.step, _passed_over_text(newer))
        return report

    @contextlib.contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started_s = time.monotonic()
        self._progress.begin("" if name in _WAITS else name)
        try:
            yield
        finally:
            self._spent_s[name] += time.monotonic() - started_s


def _forget_frames(error: BaseException | None) -> None:
    """Release the objects that the frames of ``error`` refer to, and those of its causes.

    They have memory of this attempt, which the next attempt needs, and, when ``restore`` has
    returned, the arrays on the devices. Errors may be in reference cycles.
    """
    while error is not None and error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _passed_over_text(rejected: Sequence[Rejection]) -> str:
    """Return a text of each newer step that was not restored, and why; empty without any."""
    texts = [
        f"step {rejection.step} in {TIER_WORDS[rejection.tier]} ({rejection.reason})"
        for rejection in rejected
    ]
    hidden = len(texts) - _MOST_PASSED_OVER
    more = [f"and {hidden} more"] if hidden > 0 else []
    return "; ".join([*texts[:_MOST_PASSED_OVER], *more])
