"""The steps of a run, over all processes and both tiers: their list, contents and removal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from absl import logging

from emergency_ckpt.cluster.coordination import run_and_report
from emergency_ckpt.cluster.round import Series, agree
from emergency_ckpt.errors import CorruptData, PersistentTierError, RestoreFailed, StepNotFound
from emergency_ckpt.ram.tier import LocalTier
from emergency_ckpt.restore.dialogue import RestoreDialogue
from emergency_ckpt.restore.holders import HolderCalls
from emergency_ckpt.restore.leader import LISTING_TIMEOUT_S, RestoreLeader
from emergency_ckpt.restore.request import CompleteSteps, RestoreParts, RestoreRequest
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.tree import BoxTable, PyTree, describe
from emergency_ckpt.storage.steps.writer import DirectoryWriter
from emergency_ckpt.storage.tier import PersistentTier
from emergency_ckpt.types import LeafSpec, SaveId


class StepDescription(NamedTuple):
    """The contents of a whole step, as one process can read them.

    Attributes:
      leaves: every leaf of its state.
      host_state: the non-tensor state of one of its processes, this one's where it is at hand;
        None when there is none.
      tier: where this was read.
      written_s: Unix time of its commit in the persistent tier; None when it is not there.
      metrics: as given to ``save``, from the persistent tier.
    """

    leaves: tuple[LeafSpec, ...]
    host_state: Any
    tier: str
    written_s: float | None = None
    metrics: Mapping[str, Any] | None = None


@dataclasses.dataclass
class StepCatalog:
    """The steps of one run. Its collective methods are numbered by the order of calls.

    Attributes:
      last_complete: the newest save of the local tier in this life.
      before_removal: called before a removal: a prefetch may have the step.
      removals_held: a context in which nothing else removes old steps.
      forget: called with a step that this process has removed.
      incarnation: of this life's saves.
      writer: of the persistent directory, in the process that writes there; None in the others.
      series: the rounds of surveys, removals and looks. Apart from those of restores: a prefetch
        may be under way.
    """

    parts: RestoreParts
    last_complete: Callable[[], SaveId | None]
    before_removal: Callable[[int], None]
    removals_held: Callable[[], AbstractContextManager[object]]
    forget: Callable[[int], None]
    incarnation: Callable[[], str]
    writer: DirectoryWriter | None
    surveys: int = 0
    removals: int = 0
    looks: int = 0
    series: Series = dataclasses.field(default_factory=Series)

    @property
    def _tier(self) -> LocalTier:
        return self.parts.tier

    @property
    def _persistent(self) -> PersistentTier | None:
        return self.parts.persistent

    def known(self) -> list[int]:
        """Return the steps known here to be whole, oldest first. Not collective; reads storage.

        Where storage does not answer within ``LISTING_TIMEOUT_S``, what RAM has is all that is
        known. PersistentTierError when it has nothing: that storage has nothing, nobody has said.
        """
        in_ram = self._known_in_ram()
        if self._persistent is None:
            return in_ram
        try:
            return sorted({*in_ram, *self._known_in_storage(self._persistent)})
        except (PersistentTierError, CorruptData) as error:
            if not in_ram:
                raise
            logging.warning("the steps in storage cannot be listed, RAM has %s: %s", in_ram, error)
            self.parts.events.emit("persistent.unreachable", reason=str(error)[:500])
            return in_ram

    def _known_in_storage(self, tier: PersistentTier) -> set[int]:
        limit_s = min(LISTING_TIMEOUT_S, tier.storage.timeout_s)
        deadline_s = time.monotonic() + limit_s
        rejection_reason = self.parts.timelines.rejection_reason
        return {
            each.step
            for each in tier.found.counting(deadline_s)
            if not rejection_reason(each.step, each.incarnation)
        }

    def _known_in_ram(self) -> list[int]:
        complete = self.last_complete()
        if complete is None:
            tensors, _, complete = self._tier.held()
            if complete not in {held.save for held in tensors}:
                complete = None  # a restore went back behind it
        return [] if complete is None else [complete.step]

    def survey(self, state: PyTree) -> CompleteSteps:
        """The whole steps of both tiers, by what all processes hold now. Collective; blocks.

        ``state`` is what would be restored into. Nothing is forgotten, and no save waited for.

        Raises:
          PersistentTierError: storage cannot be reached, and RAM has no whole step.
          HolderUnreachable: what some process holds cannot be read.
          RestoreFailed, DeadlineExceeded: a process failed or did not come.
        """
        parts, number = self.parts, self.surveys
        self.surveys += 1
        tree = describe(state, "survey")
        deadline_s = time.monotonic() + parts.config.restore_timeout_s
        request = RestoreRequest(tree, state, None, wants_host_state=True, retained=None)
        targets = BoxTable(tree, parts.coordinator.process_count).targets()
        # Ends before the others stop waiting for its outcome.
        calls = HolderCalls(parts.events, deadline_s - parts.config.restore_timeout_s / 10)
        dialogue = RestoreDialogue(
            parts.coordinator,
            f"survey/{number}",
            self.series,
            lambda: RestoreLeader(parts, request, targets, calls, deadline_s=deadline_s),
            deadline_s=deadline_s,
        )
        inventory, damaged = parts.holdings.inventory(), parts.tier.damaged()
        dialogue.report(inventory, tree, wants_host_state=True, damaged=damaged)
        return dialogue.learn_steps()

    def ramdisks_intact(self) -> bool:
        """Return whether every process still has its directory in RAM. Collective."""
        number = self.looks
        self.looks += 1
        own = "" if self._tier.is_intact() else "lost"
        return not self._agree("intact", number, own)

    def remove(self, step: int) -> None:
        """Remove ``step`` from both tiers, also the last. Collective; blocks.

        No save may be under way.

        Raises:
          RestoreFailed, PersistentTierError, LocalTierError: it may be gone in part then, and is
          whole nowhere.
        """
        number = self.removals
        self.removals += 1
        self.before_removal(step)
        with self.removals_held():
            errors = run_and_report(
                lambda: self._remove(step),
                lambda error: self._agree("remove", number, error),
            )
        if errors:
            raise RestoreFailed("remove", f"step {step}", errors)

    def _agree(self, kind: str, number: int, error: str) -> str:
        parts, name = self.parts, f"{kind}/{number}"
        timeout_s = parts.config.restore_timeout_s
        return agree(parts.coordinator, name, error, timeout_s, self.series)

    def _remove(self, step: int) -> None:
        if self.writer is not None:
            self.writer.remove([step], self.incarnation())
        self._tier.remove(step)
        self.forget(step)

    def describe(self, step: int) -> StepDescription:
        """Return the contents of ``step``. Not collective: from this process's RAM, else storage.

        StepNotFound when it is in neither; PersistentTierError, CorruptData.
        """
        local, stored = self._describe_local(step), self._describe_stored(step)
        if local is None:
            if stored is None:
                raise StepNotFound("describe", f"step {step}", "it is in no tier at hand")
            return stored
        if stored is None:
            return local
        return local._replace(written_s=stored.written_s, metrics=stored.metrics)

    def _describe_local(self, step: int) -> StepDescription | None:
        tensors, states, _ = self._tier.held()
        for held in reversed(tensors):
            contents = self._tier.contents(held.digest) if held.save.step == step else None
            if contents is None:
                continue
            me = self.parts.coordinator.process_index
            of_step = [state for state in states if state.save == held.save]
            value = _first_intact(
                partial(self._tier.host_state_bytes, state.save, state.owner, state.count)
                for state in sorted(of_step, key=lambda state: state.owner != me)
            )
            return StepDescription(contents.leaves, value, "local")
        return None

    def _describe_stored(self, step: int) -> StepDescription | None:
        tier, me = self._persistent, self.parts.coordinator.process_index
        if tier is None:
            return None
        view = tier.found.view()
        item = view.of(step)
        found = None if item is None else tier.found.look(view, item)
        if found is None or found.step.problem:
            return None
        stored = tier.describe(found)
        if stored.marker is None:
            leaves = tuple(leaf.spec for _, leaf in sorted(stored.leaves.items()))
            return StepDescription(leaves, None, "persistent")
        entry = view.entry(step, found.step.incarnation)
        count = len(stored.marker.digests)
        digests = stored.marker.digests
        value = _first_intact(
            partial(tier.read_document, stored.documents, owner, count, digests[owner])
            for owner in sorted(range(count), key=lambda owner: owner != me)
        )
        saved_s = found.committed_ns / 1e9
        metrics = None if entry is None else entry.metrics
        return StepDescription(stored.marker.leaves, value, "persistent", saved_s, metrics)


def _first_intact(documents: Iterable[Callable[[], bytes | None]]) -> Any:
    """Return the first host state that can be read; None without any.

    CorruptData when all of them are damaged.
    """
    damage: CorruptData | None = None
    for read in documents:
        try:
            data = read()
            if data is not None:
                return host_states.value_of(host_states.decode(data).payload)
        except CorruptData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None
