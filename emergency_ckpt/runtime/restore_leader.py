"""The leader's part of a restore: gather, plan, judge. Everyone's data, no bytes of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from emergency_ckpt.core.divergence import divergence_in
from emergency_ckpt.core.inventory import HolderInventory, Inventory, PersistentStep, Quarantined
from emergency_ckpt.core.plan_types import NoPlan, RestorePlan, TargetSet
from emergency_ckpt.core.restore_plan import compare_leaves, plan_restore
from emergency_ckpt.errors import CheckpointError, PersistentTierError, RestoreFailed
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.peers import fetch_contents, new_incarnation
from emergency_ckpt.runtime.restore_types import Answer, Report, Status, Verdict
from emergency_ckpt.tiers.local import LocalTier
from emergency_ckpt.tiers.persistent import PersistentTier
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.types import Contents, LeafSpec

MAX_ATTEMPTS = 16


class RestoreLeader:
    """Plans one restore, again after each attempt that failed on some copy."""

    def __init__(
        self,
        tier: LocalTier,
        client: TransferClient,
        persistent: PersistentTier | None,
        events: EventSink,
        *,
        targets: Mapping[int, TargetSet],
        leaves: Mapping[str, LeafSpec],
        requested_step: int | None,
        remap: bool,
        extra_holders: Sequence[str],
    ) -> None:
        self._tier = tier
        self._client = client
        self._persistent = persistent
        self._events = events
        self._targets = targets
        self._leaves = leaves
        self._requested_step = requested_step
        self._remap = remap
        self._extra_holders = extra_holders
        self._inventory = Inventory((), {})
        self._wants_host_state = False
        self._persistent_error: PersistentTierError | None = None
        self._attempts = 0
        self._last_failure = ""

    def take_reports(self, reports: Mapping[int, Report]) -> None:
        """Build the inventory. RestoreFailed when the processes want different states."""
        groups: dict[str, list[int]] = {}
        for process, report in sorted(reports.items()):
            groups.setdefault(report.state_digest, []).append(process)
        if len(groups) > 1:
            sides = " / ".join(str(group[:8]) for group in groups.values())
            raise RestoreFailed(
                "restore", "the state", f"the processes ask for different leaves or shapes: {sides}"
            )
        self._wants_host_state = any(report.wants_host_state for report in reports.values())
        holders = [report.inventory for _, report in sorted(reports.items())]
        holders += self._ask_extra_holders()
        self._inventory = Inventory(
            tuple(holders), self._manifests(holders), persistent=self._persistent_steps()
        )

    def _persistent_steps(self) -> tuple[PersistentStep, ...]:
        if self._persistent is None:
            return ()
        try:
            return tuple(self._persistent.steps())
        except PersistentTierError as error:
            # RAM may well be enough. When it is not, this error is the answer: see plan().
            self._persistent_error = error
            self._events.emit("restore.persistent_unreachable", reason=str(error))
            return ()

    def _ask_extra_holders(self) -> list[HolderInventory]:
        found: list[HolderInventory] = []
        for address in self._extra_holders:
            try:
                found.append(self._client.inventory(address))
            except CheckpointError as error:
                self._events.emit("restore.holder_unreachable", address=address, reason=str(error))
        return found

    def _manifests(self, holders: Sequence[HolderInventory]) -> dict[str, Contents]:
        """Contents by digest, each read once: replicas have equal digests."""
        found: dict[str, Contents] = {}
        for holder in holders:
            for held in holder.tensors:
                if held.digest in found:
                    continue
                contents = self._tier.contents(held.digest)
                try:
                    if contents is None:
                        contents = fetch_contents(self._client, holder.address, held.digest)
                except CheckpointError as error:
                    # Absent for the planner, which says so; another holder may still give it.
                    self._events.emit(
                        "restore.holder_unreachable", address=holder.address, reason=str(error)
                    )
                    continue
                found[held.digest] = contents
        return found

    def plan(self) -> Answer:
        """The plan for what is known to be usable now."""
        answer = plan_restore(
            self._inventory,
            self._targets,
            self._leaves,
            requested_step=self._requested_step,
            host_state_remap=self._remap,
            needs_host_state=self._wants_host_state,
        )
        if isinstance(answer, RestorePlan):
            if answer.save is not None:
                for found in divergence_in(self._inventory, answer.save):
                    self._events.emit("divergence", step=answer.step, text=found.describe())
            elif self._persistent is not None:
                stored = self._persistent.marker(answer.step).leaves
                mismatches = compare_leaves(self._leaves, stored)
                if mismatches:
                    return NoPlan("state_mismatch", step=answer.step, mismatches=mismatches)
        elif self._persistent_error is not None:
            raise self._persistent_error
        elif self._last_failure:
            return msgspec.structs.replace(answer, missing=(*answer.missing, self._last_failure))
        return answer

    def judge(self, statuses: Mapping[int, Status]) -> Verdict:
        """Done when all went well; once more when copies were found unusable; else the end."""
        failed = {p: s for p, s in sorted(statuses.items()) if s.error}
        if not failed:
            return Verdict(done=True, incarnation=new_incarnation())
        found = {q for status in statuses.values() for q in status.unusable}
        new = found - self._inventory.quarantined
        self._attempts += 1
        text = "; ".join(f"process {p}: {s.error}" for p, s in list(failed.items())[:4])
        hopeless = any(not status.unusable for status in failed.values())
        self._last_failure = text
        if hopeless or not new or self._attempts >= MAX_ATTEMPTS:
            return Verdict(error=text)
        self._inventory = msgspec.structs.replace(
            self._inventory, quarantined=self._inventory.quarantined | new
        )
        self._events.emit("restore.replanned", attempt=self._attempts, reason=text[:500])
        return Verdict()


def persistent_unusable(step: int) -> Quarantined:
    """Takes a persistent step out of the next plan."""
    return Quarantined("persistent", f"persistent/{step}")
