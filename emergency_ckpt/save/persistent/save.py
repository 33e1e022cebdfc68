"""The background half of a save to the persistent tier; the package lists its steps."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from absl import logging

from emergency_ckpt.background import Failures, run_in_thread
from emergency_ckpt.cluster.beats import Beats
from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.left_processes import LeftProcesses
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.shard_source import HostStateInbox
from emergency_ckpt.cluster.timelines import StoredChain
from emergency_ckpt.core.placement import Topology, host_state_writer, owners_of
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.core.timeline import life_of
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    PersistentTierError,
    SaveFailed,
)
from emergency_ckpt.events import EventSink
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.rounds import (
    DOCUMENTS,
    FIRST_STAGE,
    REPORT_LIMIT_CHARS,
    SaveLeftOut,
    StageReport,
    StorageRounds,
    WriterMeetings,
    agreed_crcs,
    beats_of,
    failure_of,
    raise_failure,
    report_of,
    text_of,
)
from emergency_ckpt.save.vote import LEARNED_LATE, SKIPPED
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.staging import HostShard
from emergency_ckpt.state.tree import StateTree
from emergency_ckpt.storage.meetings import new_attempt
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import PERSISTENT, OrbaxStep, SaveId, ShardId
from emergency_ckpt.work_progress import WorkProgress

_PAUSE = "skipped it: the tier pauses after failed saves"


@dataclasses.dataclass(frozen=True)
class PersistentSave:
    """One persistent save of one process.

    ``load``: returns this process's shards, or none where the process does not write; raises the
    error of their capture.
    ``metrics``: JSON values for the preservation policy; those of the first writer are kept.
    ``keeps``: the restored save, which is not written again where storage has it complete.
    ``orbax``: as given to ``save``.
    ``holders``: the writers that have shards; None: all writers.
    ``is_due``: the user asked for this save, so that its failure is an error.
    ``is_announced``: the leader has announced the save: a process may have read that too late.
    """

    save: SaveId
    tree: StateTree
    load: Callable[[], Mapping[ShardId, HostShard]]
    host_state: host_states.Payload
    topology: Topology
    writers: tuple[int, ...]
    metrics: Mapping[str, Any] | None = None
    keeps: SaveId | None = None
    orbax: OrbaxStep = OrbaxStep()  # noqa: RUF009 - immutable
    holders: tuple[int, ...] | None = None
    is_due: bool = True
    is_announced: bool = False


class PersistentSaves:
    """Carries out persistent saves, one at a time, in a background thread.

    Attributes:
      steps: the steps that storage keeps, as the first writer reported with the last save; before
        a save, as set from outside. Between saves all processes have the same ``steps``, even
        while steps that are not kept wait for their removal.
      problem: why the newest save failed here; empty when it is complete.
    """

    def __init__(
        self,
        tier: PersistentTier,
        coordinator: Coordinator,
        peers: Peers,
        inbox: HostStateInbox,
        events: EventSink,
        failures: Failures,
        *,
        chain: StoredChain,
        limits: TimeLimits,
        left_processes: LeftProcesses | None = None,
        preservation: Preservation | None = None,
    ) -> None:
        """``preservation``: removes old steps, where this process is the first writer."""
        self._tier = tier
        self._coordinator = coordinator
        self._rounds = StorageRounds(coordinator, limits.total_s, left_processes)
        self.steps: tuple[int, ...] = ()
        self.problem = ""
        self._peers = peers
        self._inbox = inbox
        self._events = events
        self._chain = chain
        self._failures = failures
        self._limits = limits
        self._progress = WorkProgress(limits)  # of the save under way, as the next
        self._came: Callable[[Collection[int]], None] = lambda _: None
        self._owes = ""  # as ``stage`` of ``_tell``: for the save under way
        self._preservation = preservation
        self._complete: SaveId | None = None  # the newest save, where that is complete

    @property
    def waits_for_others(self) -> bool:
        """Return whether this process has done its part of the save under way. From any thread."""
        return self._rounds.is_learning

    def prepare(self) -> None:
        """Import in a thread what a save needs; the save raises an error of the import again."""
        run_in_thread("eckpt-prepare-storage", self._tier.load_writer)

    def newest_listed(self) -> int | None:
        """Return the newest step that counts, by the log as this process last read it. No IO."""
        table, current = self._chain.writer.table, self._chain.timelines.current
        entries = [] if table is None else table.counting()
        return max(
            (
                entry.step
                for entry in entries
                if current is None or not current.rejection_reason(entry.step, entry.incarnation)
            ),
            default=None,
        )

    def roll_back(self, save: SaveId) -> None:
        """As ``StoredChain.roll_back``, for times without a save to storage under way."""
        self._chain.roll_back(save)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        if self._complete is not None and self._complete.step == step:
            self._complete = None

    def end_waits(self) -> None:
        """End all waits for outcomes that others decide, now and later, since this process ends."""
        self._rounds.end_waits()

    def tell_skipped(self, save: SaveId, writers: Sequence[int]) -> None:
        """Tell the others that ``save`` is left out here, since other work was still under way.

        For times without such work. A second save of the complete step is not reported: the others
        keep the first save too. ``writers``: as of ``tell_late``.
        """
        # A job that went back to an older step saves the number anew, in a life of its own.
        life, done = life_of(save.incarnation), self._complete
        if done is None or (done.step, life_of(done.incarnation)) != (save.step, life):
            self._tell(save, writers, StageReport(SKIPPED))

    def tell_late(self, save: SaveId, writers: Sequence[int]) -> None:
        """Tell the others that this process knew too late that ``save`` was due. From any thread.

        ``writers``: empty where this process has placed no state yet, and may itself be a writer.
        """
        self._tell(save, writers, StageReport(LEARNED_LATE, "late"))

    def run(self, job: PersistentSave) -> bool:
        """Save and publish; return whether the step is complete. Records failures; never raises."""
        self._complete = None
        if complete := self._run(job):
            self._complete = job.save
        return complete

    def leave_out(self, save: SaveId, writers: Sequence[int], reason: str) -> None:
        """Tell the others that this process takes no part in ``save``.

        From any thread, while no save runs.
        """
        self.problem = reason
        self._tell(save, writers, StageReport(valid_text(reason, REPORT_LIMIT_CHARS)))

    def tell_pause(self, save: SaveId, writers: Sequence[int]) -> None:
        """Tell all that the first of the ``writers``, this process, leaves ``save`` out. Blocks."""
        self._tell_left_out(save.step, "paused", reason=_PAUSE)
        self._rounds.tidy(writers)
        self._tell(save, writers, StageReport(_PAUSE, "paused"))

    def _tell(
        self, save: SaveId, writers: Sequence[int], report: StageReport, stage: str = FIRST_STAGE
    ) -> None:
        """Tell the others that this process takes no part in ``save``, or no further part.

        Never raises. A writer tells the other writers, another process the writer of its host
        state. ``stage``: the stage in which the others wait for this process; empty: in none.
        """
        me, rounds = self._coordinator.process_index, self._rounds
        is_first = bool(writers) and me == writers[0]
        calls: list[Callable[[], object]] = []
        if stage and me not in writers:
            calls.append(partial(rounds.refuse, save, report))
            if not writers:
                calls.append(partial(rounds.say_first, save, report))
        elif stage:
            stage_round = rounds.stage(save, stage, writers)
            calls.append(partial(stage_round.say, msgspec.json.encode(report)))
            if is_first:  # at once, before any other writer has sent its report
                answer = msgspec.json.encode(report.named(me))
                calls.append(partial(stage_round.tell, answer))
        if is_first:
            calls.append(partial(rounds.decide, save, report))
        for call in calls:  # each of them, whatever became of the call before
            try:
                call()
            except CheckpointError as error:
                # A process that waits for the report runs into its deadline, and reports that.
                logging.warning("step %d is not saved here: %s; %s", save.step, report.error, error)

    def _run(self, job: PersistentSave) -> bool:
        step = job.save.step
        started_s = time.monotonic()
        self._events.emit("persistent.stage", stage="started", step=step)
        self.problem = ""
        try:
            outcome = self._save(job)
        except SaveLeftOut as error:
            self._tell_left_out(step, error.cause, reason=error.problem)
            return False
        except Exception as error:  # noqa: BLE001 - recorded, raised by check_for_errors
            self.problem = text_of(error)[:500]
            self._events.emit("persistent.failed", step=step, reason=self.problem)
            if not job.is_due:
                return False
            failure = SaveFailed(
                "save",
                f"step {step} to the persistent tier",
                text_of(error),
                hint="training goes on and the next persistent save tries again",
            )
            self._failures.record(failure, cause=error, lost_step=step)
            return False
        self._failures.note_stored(step)
        self.steps = outcome.steps
        self._chain.timelines.bind()
        if outcome.kept:
            self._tell_left_out(step, "kept")
        else:
            self._chain.timelines.note_stored(job.save)
            seconds = time.monotonic() - started_s
            self._events.emit("persistent.complete", step=step, seconds=seconds)
        return True

    def _tell_left_out(self, step: int, cause: str, **fields: object) -> None:
        self._events.emit("save.skipped", step=step, tier=PERSISTENT, cause=cause, **fields)

    def _save(self, job: PersistentSave) -> StageReport:
        """Return the outcome when the step is complete."""
        me = self._coordinator.process_index
        self._progress = WorkProgress(self._limits)
        beats = Beats(
            self._coordinator,
            beats_of(job.save),
            self._progress,
            self._limits,
            lambda fields: self._events.emit("persistent.progress", step=job.save.step, **fields),
            is_leader=me == job.writers[0],
        )
        self._came = beats.all_came
        self._owes = FIRST_STAGE
        try:
            self._rounds.begin(job.save, beats.check, is_announced=job.is_announced)
            with beats if me in job.writers else self._progress.clock:
                return self._take_part(job)
        except Exception as error:
            # Whatever has failed: the others would wait until the deadline.
            self._tell(job.save, job.writers, failure_of(error), self._owes)
            raise

    def _take_part(self, job: PersistentSave) -> StageReport:
        members, me = job.writers, self._coordinator.process_index
        writer = host_state_writer(me, job.topology, members)
        if writer != me:
            document = self._own_document(job)
            self._peers.push_host_state(writer, job.save, document, for_storage=True)
            self._owes = ""
            return self._rounds.learn(job.save, members[0])
        if me != members[0]:
            self._write(job)
            return self._rounds.learn(job.save, members[0])
        self._rounds.tidy(members)
        is_kept = self._write(job)
        # Sent to all: the steps that a process finds in storage depend on how far the removal is.
        gone = self._preservation.after_save(job.save.step) if self._preservation else ()
        steps = {*self.steps, job.save.step}.difference(gone)
        outcome = StageReport(kept=is_kept, steps=tuple(sorted(steps)))
        self._rounds.decide(job.save, outcome)
        return outcome

    def _write(self, job: PersistentSave) -> bool:
        """Write this writer's part; the first writer publishes. Return whether the step is kept."""
        members = job.writers
        is_first = self._coordinator.process_index == members[0]
        shards: dict[ShardId, HostShard] = {}
        documents: dict[int, bytes] = {}

        def first() -> StageReport:
            if is_first and self._is_kept(job):
                return StageReport(kept=True)
            shards.update(job.load())
            documents.update(self._collect(job))
            return StageReport(attempt=new_attempt())

        first_report, _ = self._stage(job, FIRST_STAGE, first)
        self._came(members)
        if first_report.kept:
            return True
        _, written = self._stage(
            job, DOCUMENTS, lambda: self._write_documents(job, documents, shards)
        )
        self._write_tensors(job, shards, members, first_report.attempt)
        if is_first:
            self._publish(job, written)
        return False

    def _is_kept(self, job: PersistentSave) -> bool:
        """Return whether storage has the complete step, of this incarnation or its ancestors."""
        step, keeps = job.save.step, job.keeps
        if not self._chain.writer.has_seen:
            self._tier.create()  # storage may have been down at the start
        self._chain.begin(job.save)
        table = self._chain.writer.table
        is_listed = table is not None and table.complete(step) is not None
        if not is_listed and (keeps is None or keeps.step != step):
            return False
        try:
            stored_step = self._tier.find(step)
        except (CorruptData, PersistentTierError) as error:
            if error.retryable:
                raise
            return False  # the step is not there, or not complete
        if stored_step.entry is not None and stored_step.entry.state != "complete":
            return False
        there = stored_step.marker
        if there is None:
            expected = None if keeps is None else (keeps.step, keeps.incarnation)
            return expected == (step, stored_step.step.incarnation)
        fits = there.leaves == tuple(leaf.spec for leaf in job.tree.leaves)
        timelines = self._chain.timelines
        return there.save == keeps or (fits and timelines.leads_to(job.save, there.save))

    def _own_document(self, job: PersistentSave) -> bytes:
        me, count = self._coordinator.process_index, self._coordinator.process_count
        return host_states.encode(job.save, me, count, job.host_state, orbax=job.orbax)

    def _collect(self, job: PersistentSave) -> dict[int, bytes]:
        me = self._coordinator.process_index
        own = self._own_document(job)
        others = [owner for owner in owners_of(me, job.topology, job.writers) if owner != me]
        documents = self._inbox.wait_for(
            job.save,
            others,
            self._limits.patience_s,
            lambda absent: self._rounds.check_sent(job.save, absent),
        )
        if me == job.writers[0]:
            # The other writers wait for this process here, so nothing is being written.
            self._chain.make_room(job.save)
        return {me: own, **documents}

    def _write_tensors(
        self,
        job: PersistentSave,
        shards: Mapping[ShardId, HostShard],
        members: tuple[int, ...],
        attempt: str,
    ) -> None:
        # An incarnation that has hung must not commit what its successor writes for the same step.
        is_first = self._coordinator.process_index == members[0]
        check, started_s = self._chain.writer.check, time.monotonic()
        size_bytes = sum(shard.view.nbytes for shard in shards.values())
        self._progress.begin("tensors", size_bytes)
        meetings = WriterMeetings(
            self._rounds, job.save, members, is_first=is_first, before_commit=check
        )
        try:
            self._tier.write_tensors(
                job.save,
                job.tree,
                shards,
                members,
                meetings.meet,
                attempt,
                job.orbax,
                self._progress,
                job.holders,
            )
        except Exception as error:
            meetings.leave(text_of(error)[:500])
            raise
        seconds = time.monotonic() - started_s
        self._events.emit(
            "persistent.stage",
            stage="tensors_written",
            step=job.save.step,
            seconds=seconds,
            size_bytes=size_bytes,
        )

    def _write_documents(
        self,
        job: PersistentSave,
        documents: Mapping[int, bytes],
        shards: Mapping[ShardId, HostShard],
    ) -> StageReport:
        """Write the documents before the tensors: so a step without documents is of plain Orbax."""
        save, count = job.save, self._coordinator.process_count
        started_s = time.monotonic()
        written: dict[int, tuple[str, bool]] = {}
        for owner, data in documents.items():
            document = host_states.decode(data)
            self._tier.write_document(save.step, owner, count, data)
            written[owner] = hashlib.sha256(data).hexdigest(), document.payload is None
        seconds = time.monotonic() - started_s
        self._events.emit(
            "persistent.stage", stage="host_states_written", step=save.step, seconds=seconds
        )
        every = tuple((shard, host_shard.crc32c) for shard, host_shard in shards.items())
        return StageReport(documents=written, crcs=every)

    def _publish(self, job: PersistentSave, every: Sequence[StageReport]) -> None:
        """At the first writer: set the marker, with all that the writers reported as written."""
        documents = {owner: written for part in every for owner, written in part.documents.items()}
        crcs, differing = agreed_crcs(every)
        for shard in differing:
            text = f"{shard.leaf}{shard.box} differs between the processes that write it"
            self._events.emit("divergence", step=job.save.step, text=text)
        specs = [leaf.spec for leaf in job.tree.leaves]
        entry = self._tier.finish(job.save, documents, specs, crcs, job.metrics, job.orbax)
        self._chain.publish(entry)

    def _stage(
        self, job: PersistentSave, name: str, work: Callable[[], StageReport]
    ) -> tuple[StageReport, list[StageReport]]:
        """Do ``work``, and return after all writers have done theirs; raise if any has failed.

        Return the first writer's answer and, on the first writer, the reports of all writers.
        """
        step, writers = job.save.step, job.writers
        stage_round = self._rounds.stage(job.save, name, writers)
        self._owes = name
        self._progress.begin(name)
        report = work()
        self._progress.begin("")
        stage_round.say(msgspec.json.encode(report))
        self._owes = ""
        if self._coordinator.process_index == writers[0]:
            data = stage_round.decide(self._rounds.rule_of(job.save, name, stage_round, writers[0]))
        else:
            data = stage_round.learn()
        answer = report_of(data, name, step, writers[0])
        raise_failure(answer, step)
        every = [
            report_of(message, name, step, p) for p, message in sorted(stage_round.heard.items())
        ]
        return answer, every
