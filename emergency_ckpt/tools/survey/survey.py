"""One description of all places: the saves in RAM and in storage, and what is wrong."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence

import msgspec

from emergency_ckpt.core.boxes import whole
from emergency_ckpt.core.restore.inventory import (
    HolderInventory,
    Inventory,
    PersistentStep,
    RestoredSave,
    lives_from,
    newest_timeline,
)
from emergency_ckpt.core.restore.plan_types import NoPlan
from emergency_ckpt.core.restore.restore_plan import plan_restore
from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.errors import CheckpointError, ConfigError, PersistentTierError
from emergency_ckpt.ram.step_reader import RamStep
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.inspection import FoundStep
from emergency_ckpt.storage.steps import StoredSteps
from emergency_ckpt.tier import StepReader
from emergency_ckpt.tools.survey.places import Places, SaveState, SurveyedStep, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, ram_parts, read_ramdisks
from emergency_ckpt.types import LOCAL, PERSISTENT, SaveId, ShardId, TierName


@dataclasses.dataclass(frozen=True)
class Survey:
    """Everything that the places have.

    Attributes:
      time_s: Unix time of the survey.
      steps: the saves of all tiers and runs, newest first, those in RAM before storage's. Of one
        step in RAM, the save of the newest incarnation comes first.
      directory: the persistent directory; None when none was given.
      changing: a job saved faster than its ramdisks could be read.
    """

    places: Places
    time_s: float
    folders: tuple[ProcessFolder, ...]
    steps: tuple[SurveyedStep, ...]
    directory: StoredDirectory | None
    faults: tuple[SurveyFault, ...]
    changing: bool

    def of(self, tier: TierName) -> list[SurveyedStep]:
        """Return the steps of one tier."""
        return [step for step in self.steps if step.tier == tier]

    def open_step(self, step: SurveyedStep) -> StepReader:
        """Return the reader of one of ``steps``. Blocks for storage; CheckpointError.

        CorruptData when the step is there and cannot be used.
        """
        if step.tier == LOCAL:
            return RamStep(step.save, *ram_parts(self.folders, step.save))
        ((_, stored_step),) = self.inspect_each([step])
        if isinstance(stored_step, CheckpointError):
            raise stored_step
        return self.places.storage().reader(stored_step)

    def inspect_each(
        self, steps: Sequence[SurveyedStep]
    ) -> list[tuple[SurveyedStep, FoundStep | CheckpointError]]:
        """Return steps in storage as their files have them now, or their errors."""
        stored = self.places.storage().found
        items = [PersistentStep(x.step, 0, False, x.incarnation) for x in steps]
        results: list[FoundStep | CheckpointError | None]
        try:
            results = stored.inspect_each(stored.view(), items)
        except CheckpointError as error:
            results = [error for _ in items]
        where = self.places.directory
        return [
            (x, result or PersistentTierError("inspect", f"{where}/{x.step}", "it is gone"))
            for x, result in zip(steps, results, strict=True)
        ]

    def only_run(self, peers: Sequence[str], target: str) -> str:
        """Return the run that was asked for, or the only one on the ramdisks; "" without any.

        ``target``: the command. ConfigError when there are several, or ``peers`` alone.
        """
        if self.places.run_id is not None:
            return self.places.run_id
        runs = sorted({folder.run_id for folder in self.folders})
        if len(runs) > 1 or (peers and not runs):
            text = f"several runs: {', '.join(runs)}; " if len(runs) > 1 else ""
            raise ConfigError([f"{text}give --run-id"], target=target)
        return runs[0] if runs else ""

    def inventory(self, run_id: str) -> Inventory:
        """Return the RAM of one run as the leader of a restore sees it."""
        own = [folder for folder in self.folders if folder.run_id == run_id]
        published = (copy.published for folder in own for copy in folder.copies)
        return Inventory(
            holders=tuple(folder.holder for folder in own),
            manifests={manifest.digest: manifest.contents for manifest in published},
            timeline=newest_timeline([folder.holder for folder in own]),
        )


def take_survey(places: Places) -> Survey:
    """Describe ``places``. Blocks for storage; damage and absence are faults. ConfigError."""
    folders, ram_faults, changing = read_ramdisks(places)
    time_s = time.time()
    directory = None
    if places.directory:
        directory = read_storage(places, time_s, _restored(folders))
    faults = [*ram_faults, *(directory.faults if directory else ())]
    survey = Survey(places, time_s, (), (), directory, (), changing)
    survey = with_folders(survey, folders)
    run_id = places.run_id
    if run_id is not None and not (survey.folders or survey.steps or faults):
        where = ", ".join([*map(str, places.local_dirs), *filter(None, [places.directory])])
        faults.append(SurveyFault(where, f"there is no run {run_id!r}"))
    return dataclasses.replace(survey, faults=tuple(faults))


def with_folders(survey: Survey, folders: tuple[ProcessFolder, ...]) -> Survey:
    """Return ``survey`` with further process directories, such as those of other hosts."""
    survey = dataclasses.replace(survey, folders=(*survey.folders, *folders))
    stored = survey.directory.steps if survey.directory else ()
    run_ids = {"", survey.places.run_id}  # a plain step and a damaged one name no run
    stored = [x for x in stored if survey.places.run_id is None or x.run_id in run_ids]
    steps = [*_ram_steps(survey), *stored]
    return dataclasses.replace(survey, steps=tuple(sorted(steps, key=lambda step: -step.step)))


def _ram_steps(survey: Survey) -> Iterator[SurveyedStep]:
    folders, directory = survey.folders, survey.directory
    inventories = {run_id: survey.inventory(run_id) for run_id in {f.run_id for f in folders}}
    tables = {directory.run_id: directory.table} if directory else {}
    timelines = {
        run_id: newest_timeline(inventory.holders, table=tables.get(run_id))
        for run_id, inventory in inventories.items()
    }
    saves = {copy.published.save for folder in folders for copy in folder.copies}
    for save in sorted(saves, reverse=True):
        timeline = timelines[save.run_id]
        state: SaveState = "rolled_back"
        reason = timeline.rejection_reason(save.step, save.incarnation) if timeline else ""
        if not reason:
            reason = lacks_of(save, inventories[save.run_id])
            state = "incomplete" if reason else "whole"
        copies = [c for folder in folders for c in folder.copies if c.published.save == save]
        saved_s = max(copy.saved_s for copy in copies)
        writers = [copy.published.writer for copy in copies]
        yield SurveyedStep(
            tier=LOCAL,
            step=save.step,
            run_id=save.run_id,
            incarnation=save.incarnation,
            state=state,
            reason=reason,
            saved_s=saved_s,
            age_s=survey.time_s - saved_s,
            size_bytes=state_size_bytes(copies[0].published.contents.leaves),
            held_bytes=sum(
                entry.nbytes for copy in copies for entry in copy.published.contents.shards
            ),
            processes=max((w.process_count for w in writers if w is not None), default=None),
            holders=tuple(str(copy.folder) for copy in copies),
            lives=lives_from(save, _restored(folders)),
        )


def _restored(folders: tuple[ProcessFolder, ...]) -> list[RestoredSave]:
    """Return the saves that the newest lives began from, by the ledgers."""
    records = [folder.ledger.restored for folder in folders]
    return [record for record in records if isinstance(record, RestoredSave)]


def lacks_of(save: SaveId, inventory: Inventory) -> str:
    """Return what a restore of ``save`` from RAM would lack, in words; empty when it is complete.

    The state is that of the save's own manifests, and a process of any mesh may need all of it, so
    every element of every leaf and every host state must be held. Rolled-back saves are judged like
    others.
    """
    holders = tuple(_parts_of(save, holder) for holder in inventory.holders)
    digests = sorted({manifest.digest for holder in holders for manifest in holder.tensors})
    manifests = [inventory.manifests[d] for d in digests if d in inventory.manifests]
    if not manifests:
        return "no manifest"
    leaves = {leaf.path: leaf for leaf in manifests[0].leaves}
    plan = plan_restore(
        msgspec.structs.replace(inventory, holders=holders, persistent=(), timeline=None),
        {0: tuple(ShardId(leaf.path, whole(leaf.global_shape)) for leaf in leaves.values())},
        leaves,
        requested_step=save.step,
        host_state_remap=True,
    )
    if not isinstance(plan, NoPlan):
        return ""
    reasons = [rejected.reason for rejected in plan.rejected] or list(
        plan.missing + plan.mismatches
    )
    return "; ".join(reasons)


def newest_complete(inventory: Inventory) -> SaveId | None:
    """Return the newest save that is complete and was not rolled back, or None."""
    timeline = inventory.timeline
    saves = {manifest.save for holder in inventory.holders for manifest in holder.tensors}
    for save in sorted(saves, reverse=True):
        rejection_reason = (
            timeline.rejection_reason(save.step, save.incarnation) if timeline else ""
        )
        if not rejection_reason and not lacks_of(save, inventory):
            return save
    return None


def _parts_of(save: SaveId, holder: HolderInventory) -> HolderInventory:
    """Return the part of an inventory that is of one save."""
    return msgspec.structs.replace(
        holder,
        tensors=tuple(manifest for manifest in holder.tensors if manifest.save == save),
        host_states=tuple(
            host_state for host_state in holder.host_states if host_state.save == save
        ),
        known_complete=None,
        timeline=None,
    )


_Item = tuple[PersistentStep, Entry | None, FoundStep | None]
"""A step, its entry in the log, and what a look found where the log does not name the step."""
_LEFTOVER = re.compile(r"(.*)\.(orbax-checkpoint-tmp|rolled-back-).*")


@dataclasses.dataclass(frozen=True)
class StoredDirectory:
    """A persistent directory.

    Attributes:
      steps: those that exist, newest first, also with a problem, and hidden ones.
      table: the newest version of the log that can be used; None without one.
      unfinished: folders of saves that have not ended; they do not count.
      hidden: folders of hidden steps.
    """

    directory: str
    steps: tuple[SurveyedStep, ...] = ()
    table: Table | None = None
    unfinished: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    faults: tuple[SurveyFault, ...] = ()

    @property
    def run_id(self) -> str:
        """Return the run on record that saves there; empty without a record."""
        return "" if self.table is None else self.table.run_id


def read_storage(
    places: Places, time_s: float, restored: Sequence[RestoredSave]
) -> StoredDirectory:
    """Describe the steps of ``places.directory``. Blocks for storage; errors are faults.

    No folder of a step is looked into that the log names: ``Survey.inspect_each`` does.

    Args:
      restored: the saves that the newest lives began from, by the ledgers in RAM.
    """
    try:
        tier = places.storage()
        _check_there(tier.storage)
        return _read(tier.found, places, time_s, restored)
    except CheckpointError as error:
        return StoredDirectory(places.directory, faults=(SurveyFault.of(places.directory, error),))


def _check_there(storage: StorageDirectory) -> None:
    """Raise PersistentTierError unless the directory exists; an empty prefix of a bucket does."""
    if storage.is_object_store:
        return
    if not storage.do("list", "", storage.path.is_dir):
        raise PersistentTierError(
            "list", str(storage.path), "not a directory", hint="correct --dir"
        )


def _read(
    stored: StoredSteps, places: Places, time_s: float, restored: Sequence[RestoredSave]
) -> StoredDirectory:
    view = stored.view()
    faults = [SurveyFault.of(fault.target, fault) for fault in view.log.faults]
    steps: list[_Item] = []
    unfinished: list[str] = []
    seen = [item for item in view.steps if item.is_seen]
    unseen = [item for item in view.steps if not item.is_seen]
    steps += [(item, view.entry(item.step, item.incarnation), None) for item in seen]
    for item, result in zip(unseen, stored.inspect_each(view, unseen), strict=True):
        where = f"{places.directory}/{item.step}"
        if result is None:
            unfinished += view.unlisted.get(item.step, ())
        elif isinstance(result, CheckpointError):
            faults.append(SurveyFault.of(where, result, item.step))
        elif not result.is_junk:
            steps.append((result.step, None, result))
    if view.log.number and view.table is None:
        faults.append(SurveyFault(stored.log.target, "no version of the step log can be used"))
    elif view.table is None and any(looked_at and looked_at.marker for _, _, looked_at in steps):
        faults.append(SurveyFault(stored.log.target, "the step log is gone"))
    faults += [
        SurveyFault(f"{places.directory}/{item.step}", item.problem, item.step)
        for item, _, _ in steps
        if item.problem
    ]
    steps += [
        (hidden, entry, None)
        for entry in (view.table.steps if view.table else ())
        if (hidden := view.hidden(entry.step)) is not None
    ]
    names = sorted(name for name in view.names if _LEFTOVER.fullmatch(name))
    return StoredDirectory(
        directory=places.directory,
        steps=tuple(
            _surveyed(*listed, view.table, time_s, restored)
            for listed in sorted(steps, key=lambda x: (x[0].step, x[0].incarnation), reverse=True)
        ),
        table=view.table,
        unfinished=(*unfinished, *(name for name in names if ".orbax-checkpoint-tmp" in name)),
        hidden=tuple(name for name in names if ".orbax-checkpoint-tmp" not in name),
        faults=tuple(faults),
    )


def _surveyed(
    item: PersistentStep,
    entry: Entry | None,
    looked_at: FoundStep | None,
    table: Table | None,
    time_s: float,
    restored: Sequence[RestoredSave],
) -> SurveyedStep:
    marker = None if looked_at is None else looked_at.marker
    run_id, size_bytes, saved_s, lives = "", None, None, 0
    if entry is not None:
        assert table is not None
        run_id = "" if entry.is_plain else table.run_id
        size_bytes = entry.size_bytes if entry.marker else None
        saved_s, lives = entry.saved_s or None, entry.lives
    elif marker is not None:
        run_id, size_bytes = marker.save.run_id, state_size_bytes(marker.leaves)
    if saved_s is None and looked_at is not None and looked_at.committed_ns:
        saved_s = looked_at.committed_ns / 1e9
    reason = ""
    if table is not None and table.chain is not None:
        reason = table.chain.rejection_reason(item.step, item.incarnation)
    state: SaveState = "rolled_back" if reason else "whole"
    if entry is not None and entry.state == "hidden":
        state = "rolled_back"
        reason = reason or "it was rolled back"
        reason += f"; its folder on a file system: {entry.hidden_folder}"
    elif item.problem:
        state, reason = "damaged", item.problem
    return SurveyedStep(
        tier=PERSISTENT,
        step=item.step,
        run_id=run_id,
        incarnation=item.incarnation,
        state=state,
        reason=reason,
        saved_s=saved_s,
        age_s=None if saved_s is None else time_s - saved_s,
        size_bytes=size_bytes,
        held_bytes=None,
        processes=item.process_count or None,
        holders=(),
        lives=max(lives, lives_from(SaveId(item.step, item.incarnation, run_id), restored)),
    )
