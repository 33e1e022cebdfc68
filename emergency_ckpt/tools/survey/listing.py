"""The survey as plain values: what ``eckpt ls --json`` prints. docs/operations.md documents it."""

from __future__ import annotations

import math

import msgspec

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.tools.survey.places import SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder
from emergency_ckpt.tools.survey.survey import RamSave, SaveState, StoredSave, Survey

FORMAT = 1
"""Raised when a field is removed or gets another meaning; fields may be added."""


class ListedStep(msgspec.Struct, frozen=True):
    """One save in one tier.

    Attributes:
      run_id: empty for a step of plain Orbax, and for a damaged one.
      reason: why it is not whole.
      saved_s: Unix time of its newest part; null when it is not known.
      age_s: seconds since then.
      size_bytes: bytes of the whole state; null when only Orbax knows.
      held_bytes: bytes of its shards on these ramdisks, copies included; null in storage.
      processes: number of processes that saved it; null when it is not known.
      holders: the process directories with a part of it; empty in storage.
      doubt: why its writer is unknown although a secret was given.
    """

    tier: str
    step: int
    run_id: str
    incarnation: str
    state: SaveState
    reason: str
    saved_s: float | None
    age_s: float | None
    size_bytes: int | None
    held_bytes: int | None
    processes: int | None
    holders: tuple[str, ...]
    doubt: str = ""


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
    steps: tuple[ListedStep, ...]
    processes: tuple[ListedProcess, ...]
    directory: ListedDirectory | None
    faults: tuple[SurveyFault, ...]
    changing: bool


def listing_of(survey: Survey) -> Listing:
    """Return the survey as plain values, steps newest first, those in RAM before storage's."""
    directory = survey.directory
    steps = [
        *(_ram_step(each, survey) for each in survey.ram),
        *(_stored_step(each, survey.time_s) for each in survey.stored),
    ]
    return Listing(
        format=FORMAT,
        time_s=survey.time_s,
        steps=tuple(sorted(steps, key=lambda each: -each.step)),
        processes=tuple(_process(folder) for folder in survey.folders),
        directory=None
        if directory is None
        else ListedDirectory(
            directory.directory, directory.run_id, directory.unfinished, directory.set_aside
        ),
        faults=survey.faults,
        changing=survey.changing,
    )


def _ram_step(each: RamSave, survey: Survey) -> ListedStep:
    contents = each.copies[0].published.contents
    saved_s = max(copy.saved_s for copy in each.copies)
    writers = [copy.published.writer for copy in each.copies]
    return ListedStep(
        tier="local",
        step=each.save.step,
        run_id=each.save.run_id,
        incarnation=each.save.incarnation,
        state=each.state,
        reason=each.reason,
        saved_s=saved_s,
        age_s=survey.time_s - saved_s,
        size_bytes=sum(
            math.prod(leaf.global_shape) * DTYPE_ITEM_BYTES[leaf.dtype] for leaf in contents.leaves
        ),
        held_bytes=sum(
            entry.nbytes for copy in each.copies for entry in copy.published.contents.shards
        ),
        processes=max((w.process_count for w in writers if w is not None), default=None),
        holders=tuple(str(copy.folder) for copy in each.copies),
    )


def _stored_step(each: StoredSave, time_s: float) -> ListedStep:
    step, saved_s = each.listed.step, each.listed.saved_s
    return ListedStep(
        tier="persistent",
        step=step.step,
        run_id=each.run_id,
        incarnation=step.incarnation,
        state=each.state,
        reason=each.reason,
        saved_s=saved_s,
        age_s=None if saved_s is None else time_s - saved_s,
        size_bytes=each.listed.size_bytes,
        held_bytes=None,
        processes=step.process_count or None,
        holders=(),
        doubt=step.doubt,
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
