"""The parts of a save: the snapshot of the state, and the work that is left to be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from emergency_ckpt.cluster.process_placement import ProcessPlacement, place_process
from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.save.local_save import LocalSave
from emergency_ckpt.save.persistent.save import PersistentSave
from emergency_ckpt.save.save_plan import SnapshotPlan, plan_snapshots
from emergency_ckpt.save.save_request import SaveRequest
from emergency_ckpt.save.saved_steps import SavedSteps
from emergency_ckpt.save.saver_parts import SaverParts, start_facts
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.state.device_copies import DeviceCopies
from emergency_ckpt.state.staging import Snapshot
from emergency_ckpt.state.tree import PyTree, TreeDef, check_values, describe
from emergency_ckpt.types import SaveId

Work = Callable[[], None]


class SaveWork:
    """Snapshots of states and what is done with them. For the training thread."""

    def __init__(
        self, parts: SaverParts, schedules: Mapping[TierName, TierSchedule], saved: SavedSteps
    ) -> None:
        self._parts = parts
        self._schedules = schedules
        self._saved = saved
        self._copies = DeviceCopies(parts.config.snapshots.device_copy_bytes)
        self._placement: ProcessPlacement | None = None
        self._plan: SnapshotPlan | None = None

    @property
    def placement(self) -> ProcessPlacement | None:
        """Return where shards of the newest structure go; None before the first."""
        return self._placement

    def snapshot(self, name: TierName, save: SaveId, request: SaveRequest) -> tuple[Snapshot, Work]:
        """Take the snapshot of one tier; also return the work that is left for the background."""
        flat, treedef = jax.tree_util.tree_flatten(request.state)
        plan = self._plan_for(request.state, flat, treedef)
        placement = plan.placement
        check_values(placement.tree, flat, "save")
        payload = request.capture()
        if name == "local":
            local, snapshot = self._parts.local, plan.local.take(flat)
            job = LocalSave(
                save=save,
                leaves=placement.leaves,
                layout=placement.layout,
                snapshot=snapshot,
                host_state=payload,
                buddies=placement.buddies,
            )
            return snapshot, lambda: local.run(job)
        me = self._parts.process[0]
        writes = me in placement.writers
        snapshot = plan.all_held.take(flat) if writes else Snapshot.of_views([])
        held = placement.held if writes else ()
        work = self._persistent_work(
            PersistentSave(
                save=save,
                tree=placement.tree,
                load=lambda: dict(zip(held, snapshot.collect(), strict=True)),
                host_state=payload,
                topology=placement.topology,
                writers=placement.writers,
                metrics=request.metrics,
                keeps=self._saved.restored,
            ),
            publishes=me == placement.writers[0],
        )
        return snapshot, work

    def _persistent_work(self, job: PersistentSave, *, publishes: bool) -> Work:
        persistent, preservation = self._parts.persistent, self._parts.preservation
        assert persistent is not None
        schedule = self._schedules["persistent"]

        def work() -> None:
            complete = persistent.run(job)
            if not publishes:
                return
            # This process decides for all when to try again: the others learn of a pause.
            schedule.note_outcome(failed=not complete)
            if complete and preservation is not None:
                preservation.after_save(job.save.step)

        return work

    def _plan_for(self, state: PyTree, flat: list[Any], treedef: TreeDef) -> SnapshotPlan:
        config = self._parts.config
        plan = self._plan
        if plan is None and self._placement is not None:  # that of a restore
            plan = plan_snapshots(self._placement, config.snapshots, self._copies)
        if plan is None or not plan.local.matches(flat, treedef):
            placement = place_process(describe(state, "save"), config, self._parts.process)
            plan = plan_snapshots(placement, config.snapshots, self._copies)
            self.use_placement(placement)
        self._plan = plan
        return plan

    def use_placement(self, placement: ProcessPlacement, *, in_background: bool = False) -> None:
        """Save states of this structure, reserve their slots; RamdiskFull when there is no room."""
        if self._placement is None:
            facts = start_facts(self._parts, placement, self._schedules)
            self._parts.events.emit("start.ready", **facts)
        self._placement, self._plan = placement, None
        if "local" not in self._schedules:
            return
        tier, size_bytes = self._parts.tier, placement.layout.size_bytes
        if in_background:  # training waits for nothing that the first save does not need yet
            tier.check_reservable(size_bytes)
            tier.prefault_in_background(size_bytes)
        else:
            tier.reserve(size_bytes)
            tier.prefault_in_background()
