"""The steps of a run, over all processes and both tiers: their list, contents and removal."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from emergency_ckpt.cluster.coordination import (
    ERROR_LIMIT_CHARS,
    decode_each,
    decode_message,
    joined_errors,
    run_and_report,
)
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.round import Round, Series, agree
from emergency_ckpt.core.save.save_rules import step_number
from emergency_ckpt.core.wording import valid_text
from emergency_ckpt.errors import (
    CheckpointError,
    CorruptData,
    PersistentTierError,
    RestoreFailed,
    StepNotFound,
)
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.leader import LISTING_TIMEOUT_S, RestoreLeader
from emergency_ckpt.restore.request import (
    CompleteSteps,
    RestoreRequest,
    described,
)
from emergency_ckpt.restore.rounds import RestoreRounds
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.tree import BoxTable, PyTree, describe
from emergency_ckpt.tier import HeldDocument, StepReader, Tier
from emergency_ckpt.types import LeafSpec, TierName
from emergency_ckpt.work_progress import WorkProgress


class StepDescription(NamedTuple):
    """The contents of a complete step, as one process can read them.

    Attributes:
      leaves: every leaf of its state.
      host_state: the non-tensor state of one process, of the calling process if that is available;
        None when there is none.
      tier: where leaves and host state were read.
      written_s: Unix time of the commit in the persistent tier; None when the step is not there,
        or the tier did not answer.
      metrics: as given to ``save``, from the persistent tier; None as ``written_s``.
    """

    leaves: tuple[LeafSpec, ...]
    host_state: Any
    tier: str
    written_s: float | None = None
    metrics: Mapping[str, Any] | None = None


class Ranked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step that ranks highest, of those that one process can rank, or of all processes.

    Attributes:
      best: the rank and the step; None without any.
      error: why there is no answer; empty with one.
    """

    best: tuple[float, int] | None = None
    error: str = ""


@dataclasses.dataclass
class StepCatalog:
    """The steps of one run. Its collective methods are numbered by the order of calls.

    Attributes:
      tiers: this process's tiers, the fastest to read first.
      removals_held: a context in which no other part of the program removes old steps.
      forget: called on all processes with a step that was removed, or was to be removed.
      incarnation: of this life's saves.
      calls: the number of collective calls so far, by kind.
      series: the rounds of surveys, removals and inspections.
    """

    job: Job
    tiers: tuple[Tier, ...]
    removals_held: Callable[[], AbstractContextManager[object]]
    forget: Callable[[int], None]
    incarnation: Callable[[], str]
    calls: Counter[str] = dataclasses.field(default_factory=Counter[str])
    series: Series = dataclasses.field(default_factory=Series)

    def known(self) -> list[int]:
        """Return the steps known here to be complete, oldest first. Not collective; reads storage.

        Where a tier does not answer within ``LISTING_TIMEOUT_S``, only the steps of the other tiers
        are returned. PersistentTierError, CorruptData when the other tiers have no step, since the
        silent tier may have steps.
        """
        steps: set[int] = set()
        failures: list[PersistentTierError | CorruptData] = []
        rejection_reason = self.job.timelines.rejection_reason
        for tier in self.tiers:
            try:
                saves = tier.complete_steps(time.monotonic() + LISTING_TIMEOUT_S)
            except (PersistentTierError, CorruptData) as error:
                failures.append(error)
                continue
            steps |= {x.step for x in saves if not rejection_reason(x.step, x.incarnation)}
        for error in failures:
            if not steps:
                raise error
            text = f"a tier cannot be listed, others have {sorted(steps)}: {error}"
            self.job.events.emit("persistent.problem", cause="unreachable", reason=text[:500])
        return sorted(steps)

    def survey(self, state: PyTree) -> CompleteSteps:
        """Return the complete steps of both tiers, as all processes have them now.

        ``state`` is what would be restored into. Forgets no step, and waits for no save.
        Collective; blocks.

        Raises:
          PersistentTierError: storage cannot be reached, and RAM has no complete step.
          HolderUnreachable: a manifest of some process cannot be read.
          RestoreFailed, DeadlineExceeded: a process failed or did not come.
        """
        job, name = self.job, self._next_name("survey")
        tree = describe(state, "survey")
        limits = job.config.time_limits
        end_s = time.monotonic() + limits.patience_s
        request = RestoreRequest(tree, state, None, wants_host_state=True, retained=None)
        leader: RestoreLeader | None = None
        boxes = BoxTable(tree, job.coordinator.process_count)
        if job.coordinator.process_index == 0:
            # Ends before the others stop waiting for its outcome.
            progress = WorkProgress.until(end_s - limits.patience_s / 10)
            calls = HolderCalls(job.client, job.events, progress)
            leader = RestoreLeader(job, request, boxes.targets(), calls, end_s)
        rounds = RestoreRounds(
            job.coordinator,
            name,
            self.series,
            tree.wanted,
            leader,
            deadline_s=end_s,
        )
        (inventory, needs), damaged = described(job.holdings, boxes), job.tier.damaged()
        return rounds.survey(
            rounds.report(inventory, needs=needs, wants_host_state=True, damaged=damaged)
        )

    def ramdisks_intact(self) -> bool:
        """Return whether every process still has its directory in RAM. Collective."""
        own = "" if self.job.tier.is_intact() else "lost"
        return not self._agree(self._next_name("intact"), own)

    def remove(self, step: int) -> None:
        """Remove ``step`` from both tiers, even the last step. Collective; blocks.

        No save may be under way.

        Raises:
          RestoreFailed, PersistentTierError, LocalTierError: the step may then be gone in part.
          CheckpointError: this job only reads.
          InvalidState: ``step`` is not the number of a step.
        """
        step = step_number("remove", step)
        if self.job.config.only_reads:
            problem = "this checkpointer only reads: local_save_every and save_every are 0"
            raise CheckpointError("remove", f"step {step}", problem)
        name = self._next_name("remove")
        try:
            with self.removals_held():
                errors = run_and_report(
                    lambda: self._remove(step),
                    lambda error: self._agree(name, str(error or "")),
                )
        finally:
            # After a failure too: names of later saves follow from the call, alike on all.
            self.forget(step)
        if errors:
            raise RestoreFailed("remove", f"step {step}", errors)

    def best(self, rank: Callable[[], tuple[float, int] | None]) -> int | None:
        """Return the step that ranks highest on any process; None without any. Collective; blocks.

        ``rank``: returns rank and step of the highest of the steps that this process can read,
        which may be fewer than the others can, as after a loss of its RAM.

        Raises the error of ``rank``. RestoreFailed: ``rank`` failed on another process.
        """
        name = self._next_name("best")
        try:
            own = Ranked(rank())
        except Exception as error:
            text = valid_text(f"{type(error).__name__}: {error}", ERROR_LIMIT_CHARS)
            self._highest(name, Ranked(error=text))
            raise
        agreed = self._highest(name, own)
        if agreed.error:
            raise RestoreFailed("find", "the best step", agreed.error)
        return None if agreed.best is None else agreed.best[1]

    def _highest(self, name: str, own: Ranked) -> Ranked:
        def highest(said: Mapping[int, bytes]) -> bytes:
            ranked = decode_each(said, Ranked, name, lambda text: Ranked(error=text))
            error = joined_errors({process: row.error for process, row in ranked.items()})
            best = max((row.best for row in ranked.values() if row.best), default=None)
            return msgspec.json.encode(Ranked(best, error))

        timeout_s = self.job.config.time_limits.patience_s
        best_round = Round(self.job.coordinator, name, timeout_s, prompt=True, series=self.series)
        data = best_round.hold(msgspec.json.encode(own), best_round.when_all(highest))
        return decode_message(data, Ranked, f"{name}.told")

    def _next_name(self, kind: str) -> str:
        """Return the name of a collective call, which is the same on all processes."""
        name = f"{kind}/{self.calls[kind]}"
        self.calls[kind] += 1
        return name

    def _agree(self, name: str, error: str) -> str:
        timeout_s = self.job.config.time_limits.patience_s
        return agree(self.job.coordinator, name, error, timeout_s, self.series)

    def _remove(self, step: int) -> None:
        for tier in reversed(self.tiers):  # after a failure in storage, RAM keeps the step
            tier.remove(step, self.incarnation())

    def describe(self, step: int) -> StepDescription:
        """Return the contents of ``step``, from this process's RAM, else storage. Not collective.

        Where RAM has the step, the metrics of storage are left out if storage does not answer
        within ``LISTING_TIMEOUT_S``. StepNotFound when the step is in neither tier;
        PersistentTierError, CorruptData; InvalidState for what is not the number of a step.
        """
        step = step_number("describe", step)
        readers: list[tuple[TierName, StepReader]] = []
        missing: CheckpointError | None = None
        for tier in self.tiers:
            deadline_s = time.monotonic() + LISTING_TIMEOUT_S if readers else None
            try:
                readers.append((tier.name, tier.open_step(step, deadline_s)))
            except (StepNotFound, CorruptData) as error:
                missing = error
            except PersistentTierError as error:
                if not readers:
                    raise
                text = f"step {step} is in RAM, without what storage has of it: {error}"
                self.job.events.emit("persistent.problem", cause="unreachable", reason=text[:500])
        if not readers:
            raise StepNotFound("describe", f"step {step}", "it is in no tier at hand") from missing
        (name, reader), (_, last) = readers[0], readers[-1]
        me = self.job.coordinator.process_index
        documents = sorted(reader.documents(), key=lambda document: document.held.owner != me)
        value = _first_intact(reader, documents)
        leaves = tuple(reader.leaves.values())
        return StepDescription(leaves, value, name, last.saved_s, last.metrics)


def _first_intact(reader: StepReader, documents: Iterable[HeldDocument]) -> Any:
    """Return the first host state that can be read; None without any.

    CorruptData when all host states are damaged.
    """
    damage: CorruptData | None = None
    for document in documents:
        try:
            data = reader.document(document.held)
            return host_states.value_of(host_states.decode(data).payload)
        except CorruptData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None
