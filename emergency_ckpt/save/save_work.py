"""One call of ``save`` and its parts: snapshots, and the work that is left for each tier."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax

from emergency_ckpt.background import Closeable, chain, no_garbage_collection
from emergency_ckpt.cluster.job import Job
from emergency_ckpt.cluster.process_placement import (
    ProcessPlacement,
    copies_in_ram,
    place_process,
    single_copy_text,
)
from emergency_ckpt.config.policies import plan_text
from emergency_ckpt.core.shard_layout import Layout, lay_out, shard_nbytes
from emergency_ckpt.errors import InvalidState
from emergency_ckpt.ram.slot_choice import slots_for
from emergency_ckpt.save.local_save import LocalSave, LocalSaves, SaveResult
from emergency_ckpt.save.persistent.capture import ScratchArea, SlotCapture, StorageCapture
from emergency_ckpt.save.persistent.retention import Preservation
from emergency_ckpt.save.persistent.save import PersistentSave, PersistentSaves
from emergency_ckpt.save.schedule import TierSchedule
from emergency_ckpt.save.value_checks import FiniteLeaves
from emergency_ckpt.state import host_state as host_states
from emergency_ckpt.state.host_state import Payload
from emergency_ckpt.state.snapshot import DeviceCopies, SnapshotRecipe, StateStructure
from emergency_ckpt.state.staging import Snapshot
from emergency_ckpt.state.tree import PyTree, StateTree, check_values, describe
from emergency_ckpt.types import LOCAL, PERSISTENT, LeafSpec, OrbaxStep, SaveId, ShardId, TierName

_AFTER_REMOVAL = 1000
"""Added to the number of a demand for each removal of its step."""


@dataclasses.dataclass(frozen=True)
class TierSaves:
    """The parts of this process that carry out its saves to each tier.

    Attributes:
      persistent, preservation: None without a directory in storage.
    """

    local: LocalSaves
    persistent: PersistentSaves | None
    preservation: Preservation | None
    finite: FiniteLeaves

    @functools.cached_property
    def by_tier(self) -> dict[TierName, LocalSaves | PersistentSaves]:
        """Return what saves to each tier that this process saves to."""
        saves: dict[TierName, LocalSaves | PersistentSaves] = {LOCAL: self.local}
        if self.persistent is not None:
            saves[PERSISTENT] = self.persistent
        return saves


@dataclasses.dataclass
class SaveRequest:
    """One call of ``save``, for all tiers.

    Attributes:
      must_exist: the step is wanted whatever the policies say; a tier that has the step keeps it.
      orbax: what Orbax's readers find in storage besides the arrays.
      limit_s: how long a save may wait for the previous save; None: as the tier's setting says.
      announced: the tiers in which another process may have read too late that the step is due.
      both: both tiers are to save the step, so that they share the bytes copied off the devices.
      shared: the capture that the local save shares, until the persistent save takes it.
      result: of the local save.
      problem: why this process can take no part in the save.
    """

    save: SaveId
    state: PyTree
    host_state: object
    metrics: Mapping[str, Any] | None
    begun_s: float
    must_exist: bool = False
    orbax: OrbaxStep = OrbaxStep()  # noqa: RUF009 - immutable
    limit_s: float | None = None
    announced: frozenset[TierName] = frozenset()
    both: bool = False
    shared: SlotCapture | None = None
    result: SaveResult = dataclasses.field(default_factory=SaveResult)
    problem: InvalidState | None = None

    @property
    def step(self) -> int:
        return self.save.step

    @functools.cached_property
    def payload(self) -> Payload:
        """The captured host state, one for all tiers: another capture may differ."""
        return host_states.capture(self.host_state)

    def take_shared(self) -> SlotCapture | None:
        """Return the capture that the local save shares; the caller releases it. None next time."""
        shared, self.shared = self.shared, None
        return shared

    def release(self) -> None:
        """End the interest of a persistent save that did not begin."""
        if shared := self.take_shared():
            shared.release()


Work = Callable[[], None]


class TierWork(NamedTuple):
    """A save of one tier, as the training thread hands it to the background.

    Attributes:
      snapshot: to be started and waited for.
      work: reads the snapshot before any wait for others.
      capture: the caller closes the capture at the end, also when ``work`` was not called; the
        capture closes the snapshot.
    """

    snapshot: Snapshot
    work: Work
    capture: Closeable


class _SnapshotPlan:
    """Recipes by which this process takes snapshots of states of one structure.

    The recipes of the persistent tier are built when they are first needed.

    Attributes:
      reserve_rest: reserves the slots that the first save to RAM does not need; None: it is done.
    """

    def __init__(self, placement: ProcessPlacement, job: Job, copies: DeviceCopies) -> None:
        """``copies``: the budget of device memory, for all plans of the process."""
        self.placement = placement
        self.structure = StateStructure(placement.tree)
        self._job = job
        self._copies = copies
        self.local = self._recipe(placement.stored)
        self.reserve_rest: Work | None = None

    @functools.cached_property
    def held(self) -> SnapshotRecipe:
        """The recipe of all shards that this process has on its devices."""
        return self._recipe(self.placement.held)

    @functools.cached_property
    def specs(self) -> Mapping[str, LeafSpec]:
        """The leaves by path."""
        return self.placement.tree.specs

    @functools.cached_property
    def held_layout(self) -> Layout:
        """Places for all shards that this process has on its devices."""
        sizes = [
            (shard, shard_nbytes(self.specs[shard.leaf], shard.box))
            for shard in self.placement.held
        ]
        return lay_out(self.placement.leaves, sizes)

    @functools.cached_property
    def not_stored(self) -> tuple[ShardId, ...]:
        """The shards that this process has on its devices and does not keep in RAM."""
        stored = set(self.placement.stored)
        return tuple(shard for shard in self.placement.held if shard not in stored)

    @functools.cached_property
    def rest(self) -> SnapshotRecipe:
        """The recipe of the shards ``not_stored``."""
        return self._recipe(self.not_stored)

    def _recipe(self, shards: Sequence[ShardId]) -> SnapshotRecipe:
        job, tree = self._job, self.placement.tree
        return SnapshotRecipe(
            tree, shards, job.link, job.buffers.staging_bytes, self._copies, job.inspect
        )


class SaveWork:
    """Takes snapshots of states, and makes the work that follows. For the training thread.

    Attributes:
      placement: where shards of the newest structure go; None before the first state.
    """

    def __init__(
        self,
        job: Job,
        saves: TierSaves,
        schedules: Mapping[TierName, TierSchedule],
        saved: SavedSteps,
    ) -> None:
        self._job, self._saves = job, saves
        self._schedules = schedules
        self._saved = saved
        self._copies = DeviceCopies(job.config.device_copy_bytes)
        self._scratch = ScratchArea()
        self.placement: ProcessPlacement | None = None
        self._plan: _SnapshotPlan | None = None

    def close(self) -> None:
        """Return the memory of captures to the system once no save reads it."""
        self._scratch.release()

    def take(self, name: TierName, request: SaveRequest) -> TierWork:
        """Take the snapshot of one tier; also return the work that is left for the background.

        The local tier comes first: the persistent tier shares the local tier's snapshot.
        InvalidState, HostStateError: this process can take no part in the save.
        """
        if request.problem is not None:
            raise request.problem
        self._copies.note_save(request.step)
        with no_garbage_collection():
            plan, flat = self._plan_for(request)
            payload = request.payload
            take = self._local if name == LOCAL else self._persistent
            return take(plan, flat, request, payload)

    def _writes(self, placement: ProcessPlacement) -> bool:
        return self._job.process[0] in placement.writers

    def _local(
        self, plan: _SnapshotPlan, flat: list[Any], request: SaveRequest, payload: Payload
    ) -> TierWork:
        placement, snapshot = plan.placement, plan.local.take(flat)
        is_shared = request.both and bool(placement.stored) and self._writes(placement)
        capture = SlotCapture(snapshot, placement.stored, is_wanted=is_shared)
        request.shared = capture if is_shared else None
        job = LocalSave(
            save=request.save,
            leaves=placement.leaves,
            layout=placement.layout,
            capture=capture,
            host_state=payload,
            buddies=placement.buddies,
            orbax=request.orbax,
            is_announced=LOCAL in request.announced,
            result=request.result,
        )
        parts: list[Work] = [partial(self._saves.local.run, job)]
        if plan.reserve_rest is not None:
            parts.append(plan.reserve_rest)
            plan.reserve_rest = None
        return TierWork(snapshot, chain(*parts, plan.local.prepare), capture)

    def _persistent(
        self, plan: _SnapshotPlan, flat: list[Any], request: SaveRequest, payload: Payload
    ) -> TierWork:
        placement, shared = plan.placement, request.take_shared()
        if not self._writes(placement):
            check_values(placement.tree, flat, "save")
            recipe, shards = None, ()
        elif shared is None:
            recipe, shards = plan.held, placement.held
        else:
            recipe, shards = plan.rest, plan.not_stored
        snapshot = Snapshot(()) if recipe is None else recipe.take(flat)
        capture = StorageCapture(
            self._job.tier,
            self._scratch,
            self._job.events,
            self._saves.finite,
            request.step,
            plan.specs,
            plan.held_layout,
            snapshot,
            shards,
            shared,
            patience_s=self._job.config.time_limits.patience_s,
            batch_bytes=self._job.buffers.copy_batch_bytes,
        )
        job = PersistentSave(
            save=request.save,
            tree=placement.tree,
            load=capture.load,
            host_state=payload,
            topology=placement.topology,
            writers=placement.writers,
            metrics=request.metrics,
            orbax=request.orbax,
            keeps=self._saved.restored,
            is_announced=PERSISTENT in request.announced,
        )
        publishes = self._job.process[0] == placement.writers[0]
        persistent = self._saves.persistent
        assert persistent is not None

        def work() -> None:
            complete = persistent.run(job)
            if publishes and (complete or persistent.problem):  # else all have left it out
                # This process decides for all when to try again, and tells the others of a pause.
                self._schedules[PERSISTENT].note_outcome(failed=not complete)
            capture.close(is_written=complete)

        parts = (work,) if recipe is None else (capture.read, work, recipe.prepare)
        return TierWork(snapshot, chain(*parts), capture)

    def _plan_for(self, request: SaveRequest) -> tuple[_SnapshotPlan, list[Any]]:
        """Return the leaves, and the plan for their structure, made anew when that changes."""
        state, plan = request.state, self._plan
        flat = None if plan is None else plan.structure.leaves_of(state)
        if plan is None or flat is None:
            placement = self.place(describe(state, "save"))
            host_state_bytes = host_states.size_of(request.payload)
            plan = self.use_placement(placement, host_state_bytes, reserve="by the save")
            flat = jax.tree_util.tree_leaves(state)
        return plan, flat

    def place(self, tree: StateTree) -> ProcessPlacement:
        """Return where shards of ``tree`` go. Raises InvalidState as ``place_process``.

        From then on events and manifests name this process's slice.
        """
        job = self._job
        placement = place_process(tree, job.config, job.process)
        slice_index = placement.topology.slice_of[job.process[0]]
        job.events.locate(slice_index=slice_index)
        job.tier.note_slice(slice_index)
        return placement

    def use_placement(
        self,
        placement: ProcessPlacement,
        host_state_bytes: int,
        *,
        reserve: Literal["now", "soon", "by the save"],
    ) -> _SnapshotPlan:
        """Reserve slots for states of this structure, and return the plan for their saves.

        Raises RamdiskFull when there is no room. The room includes host states: this process's own,
        and as many of other processes as have a copy here.

        ``reserve``: "soon": in the background. "by the save": the first save to RAM by this plan
        reserves its own slot, and then the other slots in the background.
        """
        pins = PERSISTENT in self._schedules and self._writes(placement)
        if self.placement is None:
            self._tell_start(placement, pins=pins)
        self.placement = placement
        self._plan = plan = _SnapshotPlan(placement, self._job, self._copies)
        if LOCAL not in self._schedules:
            return plan
        tier, size_bytes = self._job.tier, placement.layout.size_bytes
        documents = host_state_bytes * (1 + len(placement.buddies))
        tier.plan_saves(documents, writes_storage=pins, places=placement.layout.places)
        if reserve == "now":
            tier.reserve(size_bytes)
            tier.prefault_in_background()
            return plan
        # Training does not wait for slots that the first save does not need yet.
        tier.check_reservable(size_bytes)
        if reserve == "by the save":
            plan.reserve_rest = partial(tier.prefault_in_background, size_bytes)
        else:
            tier.prefault_in_background(size_bytes)
            self._schedules[LOCAL].worker.submit_next(plan.local.prepare)
        return plan

    def _tell_start(self, placement: ProcessPlacement, *, pins: bool) -> None:
        """Report the job as the first state shows it, and parts with one copy. ``pins``: slots."""
        config, topology, events = self._job.config, placement.topology, self._job.events
        plans = {name: schedule.plan for name, schedule in self._schedules.items()}
        slots = slots_for(config.local_keep_last_n, writes_storage=pins) if LOCAL in plans else 0
        tiers = {name: plan_text(plans.get(name)) for name in (LOCAL, PERSISTENT)}
        events.emit(
            "start.ready",
            processes=topology.process_count,
            slices=len(topology.slices),
            copies=copies_in_ram(config.placement, topology) if slots else 0,
            slots=slots,
            ram_bytes=slots * placement.layout.size_bytes,
            **tiers,
            dir=config.dir or "",
        )
        text = single_copy_text(config, placement)
        if text and LOCAL in plans and self._job.process[0] == 0:
            single_bytes, state_bytes, _ = placement.single
            events.emit(
                "warning",
                cause="single_copy",
                text=text,
                single_bytes=single_bytes,
                state_bytes=state_bytes,
            )


class SavedSteps:
    """Steps found at a restore or survey, and saved since. For the training thread.

    They are in ``steps`` of each tier's saves. Processes without a save under way have equal steps.

    Attributes:
      incarnation: of the next save.
      restored: the save that was restored last; None before.
    """

    def __init__(
        self,
        saves: Mapping[TierName, LocalSaves | PersistentSaves],
        incarnation: str,
        run_id: str,
    ) -> None:
        self._saves = saves
        self.incarnation = incarnation
        self._run_id = run_id
        self._forced = (-1, 0)
        self._removed: Counter[int] = Counter()
        self.restored: SaveId | None = None

    def start_from(self, save: SaveId, incarnation: str, tier: TierName) -> None:
        """Go on from ``save``, restored from ``tier``, under ``incarnation``."""
        self.incarnation = incarnation
        self._forced = (-1, 0)
        self.restored = save
        for name, saves in self._saves.items():
            if name in (LOCAL, tier):
                saves.steps = tuple(sorted({*saves.steps, save.step}))

    def note_found(self, steps: Mapping[TierName, Sequence[int]]) -> None:
        """After a survey: the steps of each tier, oldest first."""
        for name, saves in self._saves.items():
            saves.steps = tuple(steps.get(name, ()))

    def forget_newer(self, step: int) -> None:
        """Forget the steps newer than ``step``, which was restored."""
        for saves in self._saves.values():
            saves.steps = tuple(kept_step for kept_step in saves.steps if kept_step <= step)

    def of(self, name: TierName) -> tuple[int, ...]:
        """Return the complete steps of a tier, oldest first; none for a tier without saves."""
        return self._saves[name].steps if name in self._saves else ()

    def newest(self) -> int | None:
        """Return the newest complete step, found, restored or saved; None without any."""
        return max((step for name in self._saves for step in self.of(name)), default=None)

    def forget(self, step: int) -> None:
        """``step`` was removed from both tiers."""
        self._removed[step] += 1
        for saves in self._saves.values():
            saves.steps = tuple(kept_step for kept_step in saves.steps if kept_step != step)

    def identity(self, step: int, *, forced: bool) -> SaveId:
        """Return the identity of the next save.

        A forced save, and a save after a removal, may be of a step that was saved before with other
        bytes. Bytes of two such saves must never be combined, so each demand for a step gets an
        incarnation of its own, alike on all processes, since all make the same demands.
        """
        number = _AFTER_REMOVAL * self._removed[step]
        if forced:
            before, count = self._forced
            self._forced = step, (count if step == before else 0) + 1
            number += self._forced[1]
        name = f"{self.incarnation}.{number:06d}" if number else self.incarnation
        return SaveId(step, name, self._run_id)
