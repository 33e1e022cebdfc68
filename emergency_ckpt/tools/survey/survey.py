"""One description of all places: the saves in RAM and in storage, and what is wrong."""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

from emergency_ckpt.core.restore.inventory import Inventory
from emergency_ckpt.core.restore.restore_plan import lacks_of
from emergency_ckpt.core.timeline import Timeline, newest
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, RamCopy, copies_of, read_ramdisks
from emergency_ckpt.tools.survey.storage import ListedEntry, StoredDirectory, read_storage
from emergency_ckpt.types import SaveId

SaveState = Literal["whole", "incomplete", "rolled_back", "damaged"]
"""``whole``: a restore from these places may take it. ``incomplete``: parts are not here.
``rolled_back``: the job continued from an earlier step. ``damaged``: it is there and unusable."""


@dataclasses.dataclass(frozen=True)
class RamSave:
    """One save on the ramdisks. ``reason``: why it is not ``whole``."""

    save: SaveId
    copies: tuple[RamCopy, ...]
    state: SaveState
    reason: str


@dataclasses.dataclass(frozen=True)
class StoredSave:
    """One step in storage. ``reason``: why it is not ``whole``."""

    listed: ListedEntry
    run_id: str
    state: SaveState
    reason: str

    @property
    def step(self) -> int:
        """Return its number."""
        return self.listed.step.step


@dataclasses.dataclass(frozen=True)
class Survey:
    """Everything that the places have.

    Attributes:
      time_s: Unix time of the survey.
      ram: saves on the ramdisks, of all runs, newest first.
      stored: steps in storage, newest first.
      directory: the persistent directory; None when none was given.
      changing: a job saved faster than its ramdisks could be read.
    """

    time_s: float
    folders: tuple[ProcessFolder, ...]
    ram: tuple[RamSave, ...]
    stored: tuple[StoredSave, ...]
    directory: StoredDirectory | None
    faults: tuple[SurveyFault, ...]
    changing: bool

    def inventory(self, run_id: str) -> Inventory:
        """Return the RAM of one run as the leader of a restore sees it."""
        return _inventory(self.folders, run_id)


def take_survey(places: Places) -> Survey:
    """Describe ``places``. Blocks for storage; damage and absence are faults. ConfigError."""
    ramdisks = read_ramdisks(places)
    directory = read_storage(places) if places.directory else None
    faults = [*ramdisks.faults, *(directory.faults if directory else ())]
    ram = _ram_saves(ramdisks.folders, directory)
    stored = _stored_saves(directory, places) if directory else []
    run_id = places.run_id
    if run_id is not None and not (ramdisks.folders or stored or faults):
        where = ", ".join([*map(str, places.local_dirs), *filter(None, [places.directory])])
        faults.append(SurveyFault(where, f"there is no run {run_id!r}"))
    return Survey(
        time_s=time.time(),
        folders=ramdisks.folders,
        ram=tuple(ram),
        stored=tuple(stored),
        directory=directory,
        faults=tuple(faults),
        changing=ramdisks.changing,
    )


def with_folders(survey: Survey, folders: tuple[ProcessFolder, ...]) -> Survey:
    """Return ``survey`` with further process directories, such as those of other hosts."""
    every = (*survey.folders, *folders)
    return dataclasses.replace(
        survey, folders=every, ram=tuple(_ram_saves(every, survey.directory))
    )


def _inventory(folders: tuple[ProcessFolder, ...], run_id: str) -> Inventory:
    own = [folder for folder in folders if folder.run_id == run_id]
    published = (copy.published for folder in own for copy in folder.copies)
    return Inventory(
        holders=tuple(folder.holder for folder in own),
        manifests={each.digest: each.contents for each in published},
        timeline=newest(*(folder.ledger.chain for folder in own)),
    )


def _ram_saves(
    folders: tuple[ProcessFolder, ...], directory: StoredDirectory | None
) -> list[RamSave]:
    runs = {folder.run_id for folder in folders}
    inventories = {run_id: _inventory(folders, run_id) for run_id in runs}
    saves = {copy.published.save for folder in folders for copy in folder.copies}
    found: list[RamSave] = []
    for save in sorted(saves, reverse=True):
        inventory = inventories[save.run_id]
        stored = directory.timeline if directory and directory.run_id == save.run_id else None
        timeline = newest(inventory.timeline, stored)
        state, reason = _state_of_ram(save, inventory, timeline)
        found.append(RamSave(save, tuple(copies_of(folders, save)), state, reason))
    return found


def _state_of_ram(
    save: SaveId, inventory: Inventory, timeline: Timeline | None
) -> tuple[SaveState, str]:
    rejection_reason = timeline.rejection_reason(save.step, save.incarnation) if timeline else ""
    if rejection_reason:
        return "rolled_back", rejection_reason
    lacks = lacks_of(save, inventory)
    return ("incomplete", lacks) if lacks else ("whole", "")


def _stored_saves(directory: StoredDirectory, places: Places) -> list[StoredSave]:
    found: list[StoredSave] = []
    for each in sorted(directory.steps, key=lambda listed: -listed.step.step):
        # A plain step and a damaged one name no run, so no run_id leaves them out.
        run_id = _run_of(each, directory)
        if places.run_id is not None and run_id not in {"", places.run_id}:
            continue
        step, timeline, entry = each.step, directory.timeline, each.entry
        rejection_reason = (
            timeline.rejection_reason(step.step, step.incarnation) if timeline else ""
        )
        if entry is not None and entry.state == "aside":
            reason = rejection_reason or "it was superseded"
            kept = f"{reason}; its folder, while another step has its place: {entry.aside_folder}"
            found.append(StoredSave(each, run_id, "rolled_back", kept))
        elif step.problem:
            found.append(StoredSave(each, run_id, "damaged", step.problem))
        elif rejection_reason:
            found.append(StoredSave(each, run_id, "rolled_back", rejection_reason))
        else:
            found.append(StoredSave(each, run_id, "whole", ""))
    return found


def _run_of(each: ListedEntry, directory: StoredDirectory) -> str:
    if each.entry is not None:
        return "" if each.entry.is_plain else directory.run_id
    marker = each.found.marker if each.found else None
    return "" if marker is None else marker.save.run_id
