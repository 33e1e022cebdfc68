"""The background half of a save to the local tier: copy, publish, push, vote."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from absl import logging

from emergency_ckpt.background import Failures, no_garbage_collection, wait_for
from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.cluster.shard_source import holder_name
from emergency_ckpt.cluster.timelines import Timelines
from emergency_ckpt.core.restore.divergence import find_divergence
from emergency_ckpt.core.shard_layout import Layout, layout_digest
from emergency_ckpt.errors import CheckpointError, SaveFailed, TransferError
from emergency_ckpt.events import EventSink
from emergency_ckpt.ram.manifest import build_contents
from emergency_ckpt.ram.tier import LocalTier, SlotWriter
from emergency_ckpt.save.persistent.capture import SlotCapture
from emergency_ckpt.save.value_checks import FiniteLeaves, UnchangedSaves
from emergency_ckpt.save.vote import Ballot, Outcome, Vote
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.staging import LandingPlace
from emergency_ckpt.types import LOCAL, Contents, LeafSpec, OrbaxStep, SaveId

_TOLD_AGAIN_S = 60.0
_LAYOUT_BYTES = 8
"""So much of a layout's name is in a ballot, since the ballots of thousands come at once."""
_NOT_SENT = (
    "save step %s to the local tier: the record that this process has no host state could not be"
    " sent to process %s (%s). If this host is lost before a save that sends it, restores pass over"
    " its steps in RAM"
)


class SaveResult:
    """The outcome of one save to RAM, whatever becomes of the step later. For any thread.

    The save's work refers to its result, and so does who asks: nothing else keeps old results.

    Attributes:
      is_complete: this process knows the save to be complete on all processes.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._changed = threading.Condition()
        self._has_ended = False

    def end(self) -> None:
        """Note that the save has ended on this process."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return False when that takes longer than ``timeout_s``."""
        with self._changed:
            return wait_for(self._changed, lambda: self._has_ended, timeout_s)


@dataclasses.dataclass(frozen=True)
class LocalSave:
    """One save of one process, with its bytes still in the snapshot.

    Attributes:
      layout: where each shard goes; the snapshot of ``capture`` has them in the same order.
      host_state: captured payload of the non-tensor state.
      buddies: processes that get a copy of the host state.
      orbax: as given to ``save``; written to storage with the step, if RAM's copy is written there.
      is_announced: the leader has announced the save: a process may have read that too late.
      result: gets the outcome.
    """

    save: SaveId
    leaves: Sequence[LeafSpec]
    layout: Layout
    capture: SlotCapture
    host_state: host_states.Payload
    buddies: tuple[int, ...]
    orbax: OrbaxStep = OrbaxStep()  # noqa: RUF009 - immutable
    is_announced: bool = False
    result: SaveResult = dataclasses.field(default_factory=SaveResult)


class LocalSaves:
    """Carries out local saves, one at a time, in a background thread.

    Two slots are enough for these saves by one rule: the newest save known to be complete on all
    processes, and each save whose outcome is in doubt, are never overwritten.

    Attributes:
      steps: the complete steps of which the RAM of all processes together keeps a copy, oldest
        first: those found at a restore, and those saved since, of which at most ``keep_last_n``
        stay. Between saves all processes have the same ``steps``, whatever the RAM of each one has.
      complete: the newest save that all processes have; None without one. For times without a save.
      turns: the saves that the leader has left out. For any thread.
      waits_for_others: this process has done its part of the save under way. For any thread.
    """

    def __init__(
        self,
        tier: LocalTier,
        vote: Vote,
        peers: Peers,
        events: EventSink,
        failures: Failures,
        *,
        process: tuple[int, int],
        copy_batch_bytes: int,
        timelines: Timelines,
        keep_last_n: int = 1,
        drops_older: bool = False,
        finite: FiniteLeaves,
    ) -> None:
        self._tier = tier
        self._vote = vote
        self._peers = peers
        self._events = events
        self._failures = failures
        self._process_index, self._process_count = process
        self._copy_batch_bytes = copy_batch_bytes
        self._timelines = timelines
        self._keep_last_n = keep_last_n
        self._drops_older = drops_older
        self._finite = finite
        self._unchanged = UnchangedSaves(events)
        self.complete: SaveId | None = None
        self.steps: tuple[int, ...] = ()
        self.turns = vote.turns
        self.waits_for_others = False
        self._in_doubt: dict[SaveId, SaveResult] = {}

    def restart_from(self, save: SaveId) -> None:
        """After a restore of ``save``: keep that save, and count no other save as in doubt."""
        self._finite.note_restored(is_finite=self._tier.finite == save)
        self._unchanged.restart()
        self._begin_after(save)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        if self.complete is not None and self.complete.step == step:
            self._begin_after(None)

    def _begin_after(self, save: SaveId | None) -> None:
        self.complete = save
        self._in_doubt.clear()
        self._protect()

    def tell_skipped(self, save: SaveId) -> None:
        """Vote against ``save``, since the previous save was still under way here when it was due.

        For times without a save here; otherwise the others would wait for this process in vain.
        There is no vote on a save that the leader has left out for all, nor on a second save of a
        complete step, which the others skip too.
        """
        is_kept = self.complete is not None and save.step == self.complete.step
        if not is_kept and not self.turns.is_left_out(save):
            self._vote.refuse(save)

    def leave_out(self, save: SaveId, reason: str) -> None:
        """Vote against ``save``, in which this process takes no part for a ``reason`` of its own.

        For the background thread. Otherwise the others would wait for this process's next save.
        """
        if not self.turns.is_left_out(save):
            self._vote.refuse(save, reason)

    def tell_late(self, save: SaveId) -> None:
        """Report that this process knew too late that ``save`` was due. From any thread."""
        self._vote.refuse_late(save)

    def run(self, job: LocalSave) -> None:
        """Save, publish and vote. Never raises: a failure is recorded, and becomes a vote against.

        There is no vote on a second save of a complete step.
        """
        try:
            self._run(job)
        finally:
            job.result.end()

    def _run(self, job: LocalSave) -> None:
        started_s = time.monotonic()
        if self._in_doubt:
            job.capture.snapshot.start()
        self._resolve_doubts()
        if self.complete is not None and self.complete.step == job.save.step:
            # The previous save was of this step, and the others know that it is complete.
            self._events.emit("save.skipped", step=job.save.step, tier=LOCAL, cause="kept")
            job.result.is_complete = True
            job.capture.close()
            return
        ballot, refusal = Ballot(), None
        try:
            ballot = self._publish(job)
        except Exception as error:  # noqa: BLE001 - recorded, voted, raised by check_for_errors
            refusal = error
            ballot = Ballot(refused=f"{type(error).__name__}: {error}")
            # The snapshot has no reader any more: training must not wait for it during the vote.
            job.capture.close()
        self.waits_for_others, vote_s = True, time.monotonic()
        try:
            outcome = self._vote.cast(job.save, ballot, is_announced=job.is_announced)
        finally:
            self.waits_for_others = False
        ended_s = time.monotonic()
        step, seconds = job.save.step, ended_s - vote_s
        self._events.emit(
            "save.stage", stage="voted", step=step, outcome=outcome.kind, seconds=seconds
        )
        self._settle(job, outcome, refusal, ended_s - started_s)
        if outcome.ballots:
            self._compare_replicas(job.save, outcome)
            if outcome.kind == "complete":
                self._unchanged.note(step, outcome.ballots)

    def _publish(self, job: LocalSave) -> Ballot:
        step = job.save.step
        writer = self._tier.begin_write(job.save, job.layout.size_bytes)
        try:
            self._events.emit("save.stage", stage="invalidated", step=step)
            started_s = time.monotonic()
            crcs, is_finite = self._copy(job, writer)
            copied_s = time.monotonic()
            size_bytes, seconds = job.layout.size_bytes, copied_s - started_s
            self._events.emit(
                "save.stage", stage="copied", step=step, size_bytes=size_bytes, seconds=seconds
            )
            with no_garbage_collection():
                digest = writer.stage(build_contents(job.save, job.leaves, job.layout, crcs))
            self._events.emit("save.stage", stage="staged", step=step)
            writer.publish()
        except BaseException:
            writer.abort()
            raise
        seconds = time.monotonic() - copied_s
        self._events.emit(
            "save.stage", stage="published", step=step, size_bytes=size_bytes, seconds=seconds
        )
        self._publish_host_state(job)
        shards = (placed.shard for placed in job.layout.shards)
        layout = bytes.fromhex(layout_digest(job.leaves, shards))[:_LAYOUT_BYTES]
        unchanged_since = self._unchanged.compare(step, layout, crcs)
        return Ballot(
            bytes.fromhex(digest), layout, finite=is_finite, unchanged_since=unchanged_since
        )

    def _copy(self, job: LocalSave, writer: SlotWriter) -> tuple[list[int], bool]:
        """Return the CRC of each shard, and whether all shards are known to be finite."""
        shards, specs = job.layout.shards, {leaf.path: leaf for leaf in job.leaves}
        target = LandingPlace(
            writer.mapping,
            [placed.offset for placed in shards],
            writer.mapped,
            patterns=self._finite.patterns([placed.shard for placed in shards], specs),
            batch_bytes=self._copy_batch_bytes,
        )
        crcs, non_finite = [0] * len(shards), [0] * len(shards)
        count = 0
        for landed in job.capture.read_into(target):
            for position, crc, matches in landed:
                crcs[position], non_finite[position] = crc, matches
            count += len(landed)
            if count < len(shards):
                self._events.emit("save.stage", stage="copying", step=job.save.step, shards=count)
        if job.capture.is_wanted:
            pin = writer.pin()
            job.capture.hand_over(pin, job.leaves, job.layout, crcs)
        by_shard = {p.shard: count for p, count in zip(shards, non_finite, strict=True)}
        self._finite.note(job.save.step, by_shard)
        return crcs, self._finite.is_on and not any(non_finite)

    def _publish_host_state(self, job: LocalSave) -> None:
        me, count = self._process_index, self._process_count
        data = host_states.encode(job.save, me, count, job.host_state, orbax=job.orbax)
        self._tier.publish_host_state(job.save, me, count, data)
        self._events.emit(
            "save.stage", stage="host_state_published", step=job.save.step, size_bytes=len(data)
        )
        started_s = time.monotonic()
        sent = 0
        for buddy in job.buddies:
            try:
                self._peers.push_host_state(buddy, job.save, data)
                sent += 1
            except TransferError as error:
                if job.host_state is not None:
                    raise
                # No save fails for a copy of nothing.
                logging.log_every_n_seconds(
                    logging.WARNING, _NOT_SENT, _TOLD_AGAIN_S, job.save.step, buddy, error
                )
        seconds = time.monotonic() - started_s
        self._events.emit(
            "save.stage", stage="pushed", step=job.save.step, buddies=sent, seconds=seconds
        )

    def _settle(
        self, job: LocalSave, outcome: Outcome, refusal: Exception | None, seconds: float
    ) -> None:
        save = job.save
        if outcome.kind == "complete":
            self._note_complete(save, is_finite=outcome.finite)
            job.result.is_complete = True
            self._events.emit("save.complete", step=save.step, seconds=seconds)
            return
        if outcome.kind == "in_doubt":
            self._in_doubt[save] = job.result
            self._protect()
        else:
            self._tier.note_incomplete(save)
        self._events.emit("save.incomplete", step=save.step, reason=outcome.reason)
        if outcome.learned_late and refusal is None:
            return  # nothing has failed, and the step is announced once more
        error = SaveFailed(
            "save",
            f"step {save.step} to the local tier",
            f"{outcome.kind.replace('_', ' ')}: {outcome.reason}",
            hint="training goes on; the last complete step is kept and the next save tries again",
        )
        self._failures.record(error, cause=refusal)

    def _resolve_doubts(self) -> None:
        for save in sorted(self._in_doubt):
            outcome = self._vote.learn(save)
            if outcome.kind == "in_doubt":
                continue
            result = self._in_doubt.pop(save)
            result.is_complete = outcome.kind == "complete"
            if outcome.kind == "complete" and (self.complete is None or save > self.complete):
                self._note_complete(save, is_finite=outcome.finite)
            elif outcome.kind == "incomplete":
                self._tier.note_incomplete(save)
        self._protect()

    def _note_complete(self, save: SaveId, *, is_finite: bool) -> None:
        self.complete = save
        self._timelines.bind()
        # No process needs older saves any more, whatever their outcomes were.
        doubtful = self._in_doubt.items()
        self._in_doubt = {later: result for later, result in doubtful if later > save}
        try:
            self._tier.note_complete(save, is_finite=is_finite)
            self._tier.release_orphans()
        except (CheckpointError, OSError) as error:
            failure = SaveFailed("note", f"step {save.step} as complete", str(error))
            self._failures.record(failure, cause=error)
        self._protect()
        older = [step for step in self.steps if step < save.step]
        self.steps = (*older, save.step)[-self._keep_last_n :]
        if self._drops_older:
            self._drop_older(save)

    def _drop_older(self, newest: SaveId) -> None:
        """Drop the steps before ``newest`` that are not to be kept, but for one that is being read.

        A failure is recorded; the save of ``newest`` is complete all the same.
        """
        try:
            for manifest in self._tier.held()[0]:
                if manifest.save.step < newest.step and manifest.save.step not in self.steps:
                    self._tier.drop(manifest.save)
        except (CheckpointError, OSError) as error:
            failure = SaveFailed("remove", f"the step before {newest.step}", str(error))
            self._failures.record(failure, cause=error)

    def _protect(self) -> None:
        last = self._newest_before() if self.complete is None else self.complete
        self._tier.protect({*self._in_doubt} if last is None else {last, *self._in_doubt})

    def _newest_before(self) -> SaveId | None:
        """Return the save to keep until one is complete or restored: the newest that may count."""
        tensors, _, on_record = self._tier.held()
        saves = {manifest.save for manifest in tensors} - self._tier.incomplete()
        saves -= self._in_doubt.keys()
        rejection_reason = self._timelines.rejection_reason
        saves = {save for save in saves if not rejection_reason(save.step, save.incarnation)}
        # This process may have died before it received a decision that another process received.
        known = saves.intersection([on_record, self._timelines.complete])
        return max(known or saves, default=None)

    def _compare_replicas(self, save: SaveId, outcome: Outcome) -> None:
        """At the leader: report replicas of the same shards that have stored different bits."""
        by_layout: dict[bytes, dict[str, int]] = {}
        for process, ballot in sorted(outcome.ballots.items()):
            if ballot.digest:
                by_layout.setdefault(ballot.layout, {}).setdefault(ballot.digest.hex(), process)
        for digests in by_layout.values():
            if len(digests) == 1:
                continue
            contents: dict[str, tuple[Contents]] = {}
            try:
                for digest, process in digests.items():
                    own = self._tier.contents(digest)
                    fetched = own or self._peers.fetch_contents(process, digest)
                    contents[holder_name(process)] = (fetched,)
            except (TransferError, CheckpointError) as error:
                text = f"{sorted(digests.values())}: {error}"
                self._events.emit("divergence", step=save.step, text=text)
                continue
            for divergence in find_divergence(save, contents):
                self._events.emit("divergence", step=save.step, text=divergence.describe())
