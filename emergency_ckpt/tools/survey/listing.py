"""The survey as plain values: what ``eckpt ls --json`` prints. docs/operations.md documents it."""

from __future__ import annotations

import msgspec

from emergency_ckpt.tools.survey.places import SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder
from emergency_ckpt.tools.survey.survey import Survey, SurveyedStep

FORMAT = 1
"""Raised when a field is removed or gets another meaning; fields may be added."""


class ListedProcess(msgspec.Struct, frozen=True):
    """One process directory of a ramdisk.

    Attributes:
      process_index, process_count, slice_index, hostname: of the process that saved there last;
        null before its first save.
      pid: of the process that had the directory last.
      is_running: whether it lives; null when it is of another host, or unknown.
      known_complete: the newest step that it knew to be whole everywhere.
    """

    path: str
    run_id: str
    process_index: int | None
    process_count: int | None
    slice_index: int | None
    hostname: str
    pid: int | None
    is_running: bool | None
    known_complete: int | None
    steps: tuple[int, ...]


class ListedDirectory(msgspec.Struct, frozen=True):
    """The persistent directory. ``run_id``: the run on record that saves there."""

    directory: str
    run_id: str
    unfinished: tuple[str, ...]
    set_aside: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True):
    """All of it. ``changing``: a job saved faster than its ramdisks could be read."""

    format: int
    time_s: float
    steps: tuple[SurveyedStep, ...]
    processes: tuple[ListedProcess, ...]
    directory: ListedDirectory | None
    faults: tuple[SurveyFault, ...]
    changing: bool


def listing_of(survey: Survey) -> Listing:
    """Return the survey as plain values."""
    directory = survey.directory
    return Listing(
        format=FORMAT,
        time_s=survey.time_s,
        steps=survey.steps,
        processes=tuple(_process(folder) for folder in survey.folders),
        directory=None
        if directory is None
        else ListedDirectory(
            directory.directory, directory.run_id, directory.unfinished, directory.set_aside
        ),
        faults=survey.faults,
        changing=survey.changing,
    )


def _process(folder: ProcessFolder) -> ListedProcess:
    newest = max(folder.copies, key=lambda copy: copy.saved_s, default=None)
    writer = newest.published.writer if newest else None
    known, owner = folder.ledger.complete, folder.owner
    return ListedProcess(
        path=str(folder.path),
        run_id=folder.run_id,
        process_index=writer.process_index if writer else None,
        process_count=writer.process_count if writer else None,
        slice_index=writer.slice_index if writer else None,
        hostname=writer.hostname if writer else owner.hostname if owner else "",
        pid=owner.pid if owner else None,
        is_running=owner.is_running if owner else None,
        known_complete=known.step if known else None,
        steps=tuple(sorted({copy.published.save.step for copy in folder.copies})),
    )
