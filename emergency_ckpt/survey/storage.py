"""The steps of a persistent directory, each with its own fault if it has one."""

from __future__ import annotations

import dataclasses
import math
import re

from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import CheckpointError, CorruptData, PersistentTierError
from emergency_ckpt.survey.places import Places, SurveyFault
from emergency_ckpt.tiers.persistent.run_record import RunFile
from emergency_ckpt.tiers.persistent.steps.looks import FoundStep
from emergency_ckpt.tiers.persistent.steps.records import StoredSteps
from emergency_ckpt.tiers.storage.directory import StorageDirectory

_LEFTOVER = re.compile(r"(.*)\.(orbax-checkpoint-tmp|rolled-back-).*")


@dataclasses.dataclass(frozen=True)
class StoredDirectory:
    """A persistent directory.

    Attributes:
      steps: those that exist, oldest first, also with a problem.
      run_id: the run on record that saves there; empty without a record.
      unfinished: folders of saves that have not ended; they do not count.
      set_aside: folders of steps that were moved aside.
    """

    directory: str
    steps: tuple[FoundStep, ...] = ()
    timeline: Timeline | None = None
    run_id: str = ""
    unfinished: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    faults: tuple[SurveyFault, ...] = ()


def read_storage(places: Places) -> StoredDirectory:
    """Describe the steps of ``places.directory``. Blocks for storage; errors are faults."""
    storage = StorageDirectory(places.directory, places.timeout_s)
    try:
        _check_there(storage)
        return _read(storage, places)
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


def _read(storage: StorageDirectory, places: Places) -> StoredDirectory:
    found = StoredSteps(storage, places.signing())
    inspection = found.inspect()
    faults = [SurveyFault.of(error.target, error) for error in inspection.errors]
    steps: list[FoundStep] = []
    unfinished: list[str] = []
    for number, step in inspection.steps.items():
        where = f"{places.directory}/{number}"
        if step is None:
            unfinished.append(str(number))
        elif isinstance(step, CheckpointError):
            faults.append(SurveyFault.of(where, step, number))
        elif not step.is_junk:
            steps.append(step)
            if step.step.problem:
                faults.append(SurveyFault(where, step.step.problem, number))
    timeline: Timeline | None = None
    run_id = ""
    try:
        timeline = found.timeline()
    except CorruptData as error:
        faults.append(SurveyFault.of(error.target, error))
    record = RunFile(storage).read()
    if record.damage is not None:
        faults.append(SurveyFault.of(record.damage.target, record.damage))
    if record.record is not None:
        run_id = record.record.run_id
    names = sorted(name for name in storage.names_in() if _LEFTOVER.fullmatch(name))
    return StoredDirectory(
        directory=places.directory,
        steps=tuple(steps),
        timeline=timeline,
        run_id=run_id,
        unfinished=(*unfinished, *(name for name in names if ".orbax-checkpoint-tmp" in name)),
        set_aside=tuple(name for name in names if ".orbax-checkpoint-tmp" not in name),
        faults=tuple(faults),
    )


def state_bytes(step: FoundStep) -> int | None:
    """Return the bytes of a step's arrays by its marker; None when there is no usable one."""
    if step.marker is None:
        return None
    return sum(
        math.prod(leaf.global_shape) * DTYPE_ITEM_BYTES.get(leaf.dtype, 0)
        for leaf in step.marker.leaves
    )
