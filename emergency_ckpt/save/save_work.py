"""What a save consists of: the snapshot of the state, and the work that is left to be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from emergency_ckpt.core.save.step_agreement import TierName
from emergency_ckpt.save.local_save import LocalSave
from emergency_ckpt.save.persistent.save import PersistentSave
from emergency_ckpt.save.save_plan import SaveRecipe, build_recipe
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
        self._copies = DeviceCopies(parts.settings.snapshots.device_copy_bytes)
        self._recipe: SaveRecipe | None = None

    @property
    def recipe(self) -> SaveRecipe | None:
        """How states of the newest structure are saved; None before the first."""
        return self._recipe

    def snapshot(self, name: TierName, save: SaveId, request: SaveRequest) -> tuple[Snapshot, Work]:
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

    def _persistent_work(self, job: PersistentSave, *, publishes: bool) -> Work:
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
