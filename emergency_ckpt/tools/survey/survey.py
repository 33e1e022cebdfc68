"""One description of all places: the saves in RAM and in storage, and what is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from emergency_ckpt.core.restore.inventory import (
    Inventory,
    PersistentStep,
    RestoredSave,
    lives_from,
    newest_timeline,
)
from emergency_ckpt.core.shard_layout import state_size_bytes
from emergency_ckpt.errors import CheckpointError, ConfigError, PersistentTierError
from emergency_ckpt.ram.step_reader import RamStep
from emergency_ckpt.storage.steps.inspection import FoundStep
from emergency_ckpt.tier import StepReader
from emergency_ckpt.tools.survey.completeness import lacks_of
from emergency_ckpt.tools.survey.places import (
    Places,
    SaveState,
    SurveyedStep,
    SurveyFault,
)
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, ram_parts, read_ramdisks
from emergency_ckpt.tools.survey.storage import StoredDirectory, read_storage
from emergency_ckpt.types import LOCAL, TierName


@dataclasses.dataclass(frozen=True)
class Survey:
    """Everything that the places have.

    Attributes:
      time_s: Unix time of the survey.
      steps: the saves of all tiers and runs, newest first, those in RAM before storage's.
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
        return _inventory(self.folders, run_id)


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


def _inventory(folders: tuple[ProcessFolder, ...], run_id: str) -> Inventory:
    own = [folder for folder in folders if folder.run_id == run_id]
    published = (copy.published for folder in own for copy in folder.copies)
    return Inventory(
        holders=tuple(folder.holder for folder in own),
        manifests={manifest.digest: manifest.contents for manifest in published},
        timeline=newest_timeline([folder.holder for folder in own]),
    )


def _ram_steps(survey: Survey) -> Iterator[SurveyedStep]:
    folders, directory = survey.folders, survey.directory
    inventories = {run_id: _inventory(folders, run_id) for run_id in {f.run_id for f in folders}}
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
